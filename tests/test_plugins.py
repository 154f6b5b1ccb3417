"""Plug-ins: files and modules that add things by name, in commands, workers and when a run is resumed."""

import json
import py_compile
import re
import runpy
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
import torch
from torch import nn

import _runs
from small_benchmark import StopAtStep, small_settings, write_benchmark
from spcl.errors import SpclError
from spcl.models import BACKBONES, InputSpec
from spcl.optimizers import OPTIMIZERS
from spcl.plugins import Plugin, PluginError, load_plugins
from spcl.runs import FolderError, InterruptedRunError, execute, resolve_settings, resume_settings

PLUGIN = '''
"""Things of my own."""

import json

import torch
from torch import nn

from spcl.memory import Reservoir
from spcl.methods import Method, Weights
from spcl.plugins import backbone, memory, optimizer, tracker


class Doubled(Method):
    """Twice the sum of the gradients."""

    name = "doubled"
    family = "MTL"
    summary = "twice the sum"
    reference = "nobody"

    def weigh(self, gradients):
        return Weights(torch.full((len(gradients.names),), 2.0))


@backbone("two-layers")
def two_layers(inputs, width=16):
    """Two layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs.shape[0], width), nn.Tanh(), nn.Linear(width, width))


@memory("first-come")
class FirstCome(Reservoir):
    """Keeps the first samples."""

    def rank(self, arrivals):
        return arrivals.astype(float)


@optimizer("sign")
class SignSGD(torch.optim.Optimizer):
    """Steps along the sign of the gradient."""

    def __init__(self, parameters, lr=0.01, scale=1.0):
        super().__init__(parameters, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * group["scale"] * parameter.grad.sign()


@tracker("diary")
class Diary:
    """Writes the result to a file."""

    def __init__(self, folder, settings):
        self.folder, self.settings = folder, settings

    def step(self, step, values): ...

    def evaluation(self, step, accuracies): ...

    def result(self, measures):
        (self.folder / "diary.json").write_text(json.dumps([self.settings["backbone.name"], measures["A"]]))

    def close(self): ...
'''

THINGS = {
    "method": "doubled",
    "backbone": {"name": "two-layers", "width": 12},
    "memory": "first-come",
    "optimizer": {"name": "sign", "scale": 0.5},
    "trackers": ["diary"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "my_things.py").write_text(PLUGIN)
    write_benchmark(folder / "data.npz")
    return folder


def spcl(folder: Path, *arguments: object) -> _runs.Done:
    return _runs.spcl(*arguments, folder=folder)


def test_everything_a_file_defines_works_by_name_and_resumes(folder: Path, tmp_path: Path) -> None:
    plugin = folder / "my_things.py"
    settings = small_settings(folder / "data.npz", plugins=[str(plugin)], **THINGS)
    result = execute(settings, tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "settings.json").read_text())
    ((name, checksum),) = [(each["name"], each["sha256"]) for each in recorded["plugins"]]
    assert ((tmp_path / "run" / name).resolve(), checksum) == (plugin, settings.plugins[0].sha256)
    assert recorded["backbone"] == {"name": "two-layers", "width": 12}
    assert recorded["memory"] == "first-come"
    assert json.loads((tmp_path / "run" / "diary.json").read_text()) == ["two-layers", result.accuracy]
    assert resume_settings(tmp_path / "run") == settings


def test_an_interrupted_run_resumes_exactly_and_only_with_the_same_plugin(folder: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "things.py"
    plugin.write_text(PLUGIN)
    settings = small_settings(folder / "data.npz", plugins=[str(plugin)], **THINGS)
    whole = execute(settings, tmp_path / "whole")
    with pytest.raises(InterruptedRunError):
        execute(settings, tmp_path / "stopped", view=StopAtStep(12))
    assert execute(resume_settings(tmp_path / "stopped"), tmp_path / "stopped", resume=True).tasks == whole.tasks
    plugin.write_text(PLUGIN + "\n# changed\n")
    changed = spcl(tmp_path, "run", "--resume", "--out", "stopped")
    assert re.search(r"error: the plug-in .*things\.py has changed since it was recorded", changed.stderr)


def test_workers_of_a_grid_load_the_plugin_and_tables_show_its_method(folder: Path, tmp_path: Path) -> None:
    flags = ["--benchmark", folder / "data.npz", "--plugin", folder / "my_things.py", "--device", "cpu"]
    sets = [word for value in ("tasks=3", "batch_size=8", "backbone=two-layers") for word in ("--set", value)]
    grid = ["grid", *flags, *sets, "--methods", "doubled,er", "--scenarios", "task", "--configs", "0", "--seeds", "0-1"]
    made = spcl(tmp_path, *grid, "--jobs", "2", "--out", "grid")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "4 of 4 runs are complete" in made.stdout
    table = spcl(tmp_path, "table", "grid", "--format", "markdown")
    assert "| doubled |" in table.stdout, table.stderr


# -- settings


def test_options_of_one_thing_are_not_passed_on_to_another() -> None:
    layers = {"optimizer": {"name": "sgd", "momentum": 0.9}}, {"optimizer": "adamw"}, {"optimizer": {"weight_decay": 1}}
    assert resolve_settings(*layers).optimizer == {"name": "adamw", "weight_decay": 1}
    assert resolve_settings({"optimizer": {"name": "adam"}}).optimizer == "adam"
    assert resolve_settings({"optimizer": {"eps": 1e-7}}).optimizer == {"name": "adam", "eps": 1e-7}
    assert resolve_settings({"backbone": {"hidden": [8]}}).backbone == {"name": "mlp", "hidden": [8]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "resnet19"}, r"there is no backbone 'resnet19'; did you mean 'resnet18'\?"),
        ({"backbone": {"name": "mlp", "hiden": 3}}, r"backbone 'mlp' has no option 'hiden'; did you mean 'hidden'\?"),
        ({"optimizer": {"lr": 3}}, r"optimizer 'adam' has no option 'lr'"),
        ({"optimizer": "lbfgs"}, r"there is no optimizer 'lbfgs'"),
        ({"memory": {"name": "reservoir", "seed": 1}}, r"memory 'reservoir' has no option 'seed'; it has none"),
        ({"trackers": ["tensorbord"]}, r"there is no tracker 'tensorbord'; did you mean 'tensorboard'\?"),
        ({"plugins": ["nothing_here.py"]}, r"the plug-in .*nothing_here\.py does not exist"),
        ({"plugins": ["no_such_module"]}, r"there is no plug-in 'no_such_module'"),
    ],
)
def test_unknown_names_and_options_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpclError, match=message):
        resolve_settings(settings)


def test_a_plugin_that_fails_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\n1 / x - x\ny = x / 0\n")
    with pytest.raises(PluginError, match=r"broken\.py cannot be used in line 3: ZeroDivisionError: division by zero"):
        load_plugins([str(tmp_path / "broken.py")])
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(PluginError, match=r"empty\.py cannot be used: it defines nothing that can be used by name"):
        load_plugins([str(tmp_path / "empty.py")])


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    source = "from spcl.plugins import backbone\n@backbone('mlp')\ndef mine(inputs): ...\n"
    (tmp_path / "twin.py").write_text(source)
    with pytest.raises(PluginError, match=r"two things of the kind backbone are named 'mlp'"):
        load_plugins([str(tmp_path / "twin.py")])


def test_a_thing_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = "from spcl.plugins import backbone\n@backbone('no-module')\ndef mine(inputs): return 7\n"
    (tmp_path / "wrong.py").write_text(source)
    load_plugins([str(tmp_path / "wrong.py")])
    with pytest.raises(SpclError, match=r"backbone 'no-module' must make a torch\.nn\..*Module, but makes 7"):
        BACKBONES.make("no-module", InputSpec((4,), torch.float32))


def test_plugins_of_a_file_and_of_flags_are_both_loaded(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            f"from torch import nn\nfrom spcl.plugins import backbone\n@backbone('{name}')\n"
            "def make(inputs): return nn.Flatten()\n"
        )
    layers = {"plugins": str(tmp_path / "one.py")}, {"plugins": [str(tmp_path / "two.py")]}
    settings = resolve_settings(*layers)
    assert [Path(plugin.name).name for plugin in settings.plugins] == ["one.py", "two.py"]
    assert {"one", "two"} <= set(BACKBONES)


def test_a_run_of_another_version_of_a_plugin_is_another_run(folder: Path, tmp_path: Path) -> None:
    source = "from torch import nn\nfrom spcl.plugins import backbone\n@backbone('versioned')\n"
    plugin = tmp_path / "versioned.py"
    plugin.write_text(source + "def make(inputs): return nn.Linear(8, 4)\n")
    execute(small_settings(folder / "data.npz", plugins=[str(plugin)], backbone="versioned"), tmp_path / "run")
    plugin.write_text(source + "def make(inputs): return nn.Linear(8, 5)\n")
    with pytest.raises(FolderError, match=r"holds a run with plugins = versioned\.py \(\w{12}\), not versioned\.py"):
        execute(small_settings(folder / "data.npz", plugins=[str(plugin)], backbone="versioned"), tmp_path / "run")


# -- optimisers and modules


def test_every_optimiser_of_torch_takes_a_step() -> None:
    for name in OPTIMIZERS:
        if name == "sign":  # of the plug-in above
            continue
        weight = nn.Parameter(torch.ones(2))
        optimizer = OPTIMIZERS.make(name, [weight], lr=0.1)
        weight.square().sum().backward()
        optimizer.step()
        assert bool((weight < 1).all()), name


def test_a_package_is_a_plugin_with_the_checksum_of_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "nets_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("from nets_of_mine import small\n")
    source = "from torch import nn\nfrom spcl.plugins import backbone\n@backbone('of-mine')\ndef f(inputs): ...\n"
    (package / "small.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (first,) = load_plugins(["nets_of_mine"])
    assert "of-mine" in BACKBONES
    (package / "small.py").write_text(source + "# changed\n")
    with pytest.raises(PluginError, match="has changed since it was recorded"):
        load_plugins([first])


# -- what runs is what was checked

RECORDED = (
    "from torch import nn\nfrom spcl.plugins import backbone\n"
    "@backbone('{name}')\ndef make(inputs): return nn.Flatten()\n"
)
LEAVES_A_MARK = "from pathlib import Path\nPath({mark!r}).touch()\n"


def test_a_changed_plugin_does_not_run_before_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "mark"
    for name in ("reviewed.py", "reviewed_module"):
        file = tmp_path / f"{Path(name).stem}.py"
        file.write_text(RECORDED.format(name=f"unchanged {name}"))
        recorded = Plugin(
            name=str(file) if name.endswith(".py") else name, sha256=sha256(file.read_bytes()).hexdigest()
        )
        file.write_text(LEAVES_A_MARK.format(mark=str(mark)) + RECORDED.format(name=f"changed {name}"))
        with pytest.raises(PluginError, match="has changed since it was recorded"):
            load_plugins([recorded])
        assert not mark.exists(), name


def test_a_record_without_a_checksum_runs_nothing(folder: Path, tmp_path: Path) -> None:
    mark, plugin = tmp_path / "mark", tmp_path / "things.py"
    plugin.write_text(LEAVES_A_MARK.format(mark=str(mark)) + RECORDED.format(name="unchecked"))
    settings = small_settings(folder / "data.npz").model_dump(mode="json") | {"plugins": [str(plugin)]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(PluginError, match=r"settings\.json records the plug-in .*things\.py without a checksum"):
        resume_settings(tmp_path / "run")
    assert not mark.exists()


def test_compiled_code_beside_a_plugin_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    mark, other = tmp_path / "mark", tmp_path / "other.py"
    other.write_text(LEAVES_A_MARK.format(mark=str(mark)))
    package = tmp_path / "reviewed_package"
    package.mkdir()
    plugins = tmp_path / "plain.py", package / "__init__.py", package / "networks.py"
    for plugin in plugins:
        plugin.write_text(RECORDED.format(name=f"compiled {plugin.name}"))
        planted = Path(cache_from_source(plugin))
        py_compile.compile(str(other), cfile=str(planted), invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    (package / "__init__.py").write_text("import reviewed_package.networks\n")
    load_plugins([str(plugins[0]), "reviewed_package"])
    assert {"compiled plain.py", "compiled networks.py"} <= set(BACKBONES)
    assert not mark.exists()


def test_compiled_code_beside_the_modules_that_a_plugin_imports_does_not_run(tmp_path: Path) -> None:
    mark, other, folder = tmp_path / "mark", tmp_path / "other.py", tmp_path / "plugin"
    other.write_text(LEAVES_A_MARK.format(mark=str(mark)))
    (folder / "helpers_of_tests").mkdir(parents=True)
    for name in ("helper_of_tests.py", "helpers_of_tests/__init__.py", "helpers_of_tests/inner.py"):
        (folder / name).write_text(f"NAME = {name!r}\n")
        planted = Path(cache_from_source(folder / name))
        py_compile.compile(str(other), cfile=str(planted), invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    imports = "import helper_of_tests\nfrom helpers_of_tests.inner import NAME\nassert NAME.endswith('inner.py')\n"
    (folder / "importing.py").write_text(imports + RECORDED.format(name="importing"))
    load_plugins([str(folder / "importing.py")])
    assert "importing" in BACKBONES
    assert not mark.exists()


def test_sources_beside_a_plugin_are_preferred_to_compiled_modules(tmp_path: Path) -> None:
    (tmp_path / "helpers_with_twins").mkdir()
    for name in ("helper_with_twin", "helpers_with_twins/__init__", "helpers_with_twins/inner"):
        (tmp_path / f"{name}.py").write_text("")
        (tmp_path / f"{name}{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library, so that to load it is an error")
    imports = "import helper_with_twin, helpers_with_twins.inner\n"
    (tmp_path / "with_twins.py").write_text(imports + RECORDED.format(name="with twins"))
    load_plugins([str(tmp_path / "with_twins.py")])
    assert "with twins" in BACKBONES


def test_a_program_beside_a_plugin_runs_as_before(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(RECORDED.format(name="beside a program"))
    (tmp_path / "program.py").write_text("RESULT = 6 * 7\n")
    load_plugins([str(tmp_path / "loaded.py")])
    assert runpy.run_path(str(tmp_path / "program.py"))["RESULT"] == 42


def test_a_plugin_file_that_was_edited_is_used_as_it_is_now(tmp_path: Path) -> None:
    plugin = tmp_path / "edited.py"
    for width in (4, 5):
        plugin.write_text(RECORDED.format(name="edited").replace("nn.Flatten()", f"nn.Linear(8, {width})"))
        (loaded,) = load_plugins([str(plugin)])
        assert loaded.sha256 == sha256(plugin.read_bytes()).hexdigest()
        assert BACKBONES.make("edited", InputSpec((8,), torch.float32)).out_features == width
