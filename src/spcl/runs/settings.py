"""The settings of a run: typed and strict about unknown names; layers, parsing, identity, and their description."""

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, create_model, field_validator
from pydantic.fields import FieldInfo

from spcl._util.registry import Named, Registry
from spcl._util.validation import setting, tagged
from spcl.data.catalogue import PRESET_SETTINGS, PRESETS, SOURCE_BENCHMARKS, Preset
from spcl.data.protocol import Paradigm
from spcl.encoders import ENCODERS
from spcl.errors import SpclError
from spcl.learner.predictors import PREDICTORS
from spcl.losses import LOSSES
from spcl.memory import MEMORIES
from spcl.methods import recorded_settings
from spcl.methods.registry import method_class
from spcl.models import BACKBONES
from spcl.optimizers import OPTIMIZERS
from spcl.options import CHANGEABLE, FILE, LAYOUT, LEARNER, LOADING, OPTIONS, PLANNED, RECORD, SPEED, LearnerOptions
from spcl.plugins import Plugin
from spcl.schedules import SCHEDULES
from spcl.trackers import TRACKERS
from spcl.transforms import TRANSFORMS

NAMED: dict[str, Registry[Any]] = {
    "backbone": BACKBONES,
    "encoder": ENCODERS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "memory": MEMORIES,
    "predict_by": PREDICTORS,
    "loss": LOSSES,
    "regression_loss": LOSSES,
    "multilabel_loss": LOSSES,
}
"""Settings that name a thing, or give its name and options, and where these things are."""

LISTED: dict[str, Registry[Any]] = {"augment": TRANSFORMS, "trackers": TRACKERS}
"""Settings that list such things."""


class _ProblemSettings(BaseModel):
    """Problem: data, method, label set and timeline."""

    plugins: tuple[Plugin, ...] = setting(
        (), "Python files or modules that add methods, backbones and more", LEARNER, CHANGEABLE
    )
    benchmark: str = setting(
        "ps-glyphs", "a known benchmark, a path to your data, or a plug-in's data set", LOADING, FILE
    )
    data: dict[str, Any] = setting(
        {},
        "options of the data's loader: size and mode of a folder of pictures, kind of the targets of an .npz file, or "
        "options of a plug-in's data set",
        LOADING,
    )
    preset: str = setting(
        "default",
        "default; plus: more samples of memory, updates, augmentation and averaged weights; paper: batch-norm's "
        "momentum as published; released: all that the published code does",
    )
    method: dict[str, Any] = setting({"name": "soro"}, "its name, and its own settings", LEARNER, CHANGEABLE)
    config: int = setting(0, "which label set and timeline: 3 × label set + timeline", PLANNED, LAYOUT, ge=0)
    protocol: str | None = setting(None, "a protocol file; drawn by protocol_seed if not given", LAYOUT, FILE)
    protocol_seed: int = setting(0, "of the label sets and timelines", LAYOUT, ge=0)
    fit: bool = setting(False, "rescale a timeline that does not fit the data", LAYOUT)
    paradigm: Paradigm = setting("parallel", "parallel, joint (all tasks at once) or serial (one by one)", LAYOUT)
    overlap: float = setting(1.0, "how much tasks may overlap, when the protocol is drawn", LAYOUT, ge=0.0, le=1.0)
    gap: int = setting(0, "how many idle steps may come between tasks, when the protocol is drawn", LAYOUT, ge=0)
    epochs: int = setting(1, "passes of every task over its samples; timelines are stretched by it", LAYOUT, ge=1)
    at_once: int | None = setting(
        None,
        "how many sources run at once, one starting when another ends; of data of several sources, in an order that is "
        "drawn, too",
        LAYOUT,
        ge=1,
    )


if TYPE_CHECKING:

    class _LearnerSettings(LearnerOptions, BaseModel):
        stability: bool

else:
    _LearnerSettings = create_model(
        "_LearnerSettings",
        __doc__="Learner.",
        **{
            option.setting: (
                option.type,
                setting(
                    option.run_default,
                    option.description,
                    LEARNER,
                    *option.tags,
                    ge=option.at_least,
                    gt=option.above,
                    lt=option.below,
                ),
            )
            for option in OPTIONS.values()
        },
    )


class _PartSettings(BaseModel):
    """Parts of the learner."""

    encoder: Named | None = setting(
        None, "in front of the network, one for each source: affine, a scale and shift of its own, …", LEARNER
    )
    optimizer: Named = setting("adam", "adam, adamw, sgd, …: its name, and its own options", LEARNER)
    schedule: Named = setting("constant", "of the learning rate over the steps of the run")
    loss: Named = setting("cross-entropy", "of classification tasks", LEARNER, LAYOUT)
    regression_loss: Named = setting("mse", "of regression tasks", LEARNER)
    multilabel_loss: Named = setting("binary-cross-entropy", "of multi-label tasks", LEARNER)
    normalise: bool = setting(
        True,
        "standardise images by mean and deviation of the training data, else they are in 0…1; likewise the "
        "inputs of networks that can standardise them",
    )
    augment: tuple[Named, ...] = setting((), "random transforms of new and of replayed samples, in order", LEARNER)
    memory: Named = setting(
        "balanced", "which samples are kept for replay, and how they are drawn: balanced, reservoir, …", LEARNER
    )
    frozen: tuple[str, ...] = setting((), "patterns of names of backbone parameters that are not trained", LEARNER)
    unfreeze_after: int | None = setting(None, "train frozen parameters, too, after this many steps", ge=0)
    precision: Literal["float32", "bfloat16"] = setting("float32", "of forward and backward passes", LEARNER)


class _ExecutionSettings(BaseModel):
    """Evaluation, records and hardware."""

    validation: float = setting(
        0.0, "evaluate on this part of the training data instead of the test data", LOADING, ge=0.0, lt=1.0
    )
    evaluate: Literal["ended", "seen"] = setting("seen", "when a task ends: it alone, or every task seen", RECORD)
    evaluate_every: int | None = setting(None, "also evaluate every this many steps", RECORD, ge=1)
    prequential: bool = setting(False, "evaluate every batch before it is trained on: test, then train", RECORD)
    record_every: int = setting(1, "write losses and stability every this many steps", RECORD, ge=1)
    trackers: tuple[Named, ...] = setting((), "where to report: tensorboard, wandb, …", RECORD)
    checkpoint_seconds: float = setting(60.0, "longest time between checkpoints; 0 saves every step", RECORD, ge=0.0)
    keep_checkpoints: int = setting(2, "checkpoints of an unfinished run to keep, the newest included", RECORD, ge=1)
    keep_model: bool = setting(True, "keep the trained model in model.safetensors", RECORD)
    device: str = setting("auto", "auto, cpu, cuda, …", LEARNER, SPEED)
    threads: int | None = setting(None, "CPU threads; PyTorch's choice if not given", LEARNER, SPEED, ge=1, le=1024)
    data_dir: str | None = setting(None, "where the publishers' files are", LOADING, FILE, SPEED)


class RunSettings(_ExecutionSettings, _LearnerSettings, _PartSettings, Preset, _ProblemSettings):
    """Everything that decides a run; ``settings.json`` of a run folder holds one of these and can be run again.

    The bases are collected from right to left.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("frozen", *LISTED, mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """Accept one name, or several separated by commas, as a list."""
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator(*NAMED)
    @classmethod
    def _without_options(cls, value: Named | None) -> Named | None:
        """Record a name without options as the name alone."""
        return value["name"] if isinstance(value, dict) and value.keys() == {"name"} else value


BOOKKEEPING = frozenset(tagged(RunSettings, SPEED, RECORD))
"""Settings that change how a run is executed and recorded; two runs that differ in them alone are the same run."""

FILES = frozenset(tagged(RunSettings, FILE))
"""Settings that name files or folders."""

VARIED = tagged(RunSettings, PLANNED)
"""Settings that a grid varies, besides the method."""


def with_defaults(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings, and the defaults of settings that did not exist when they were recorded.

    Settings whose default depends on the benchmark stay missing.

    >>> with_defaults({"benchmark": "ps-emnist", "seed": 1})["epochs"]
    1
    """
    fields = RunSettings.model_fields.items()
    defaults = {name: field.default for name, field in fields if name not in Preset.model_fields}
    method = {"method": recorded_settings(recorded["method"])} if "method" in recorded else {}
    return {**defaults, **recorded, **method}


def merge_settings(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of increasing precedence; options of one method, backbone, … are not passed on to another.

    They may be given by name alone. Plug-ins of all layers are loaded.

    >>> merge_settings({"seed": 0, "method": {"name": "soro", "sigma": 1.0}}, {"method": {"alpha": 0.1}})
    {'seed': 0, 'method': {'name': 'soro', 'sigma': 1.0, 'alpha': 0.1}}
    >>> merge_settings({"method": {"name": "soro", "sigma": 1.0}}, {"method": {"name": "er"}})
    {'method': {'name': 'er'}}
    >>> merge_settings({"method": "soro"}, {"method": {"sigma": 1.0}})
    {'method': {'name': 'soro', 'sigma': 1.0}}
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        named = {name: {"name": layer[name]} for name in ("method", *NAMED) if isinstance(layer.get(name), str)}
        plugins = {"plugins": _union(merged.get("plugins"), layer["plugins"])} if "plugins" in layer else {}
        merged = _merge(merged, {**layer, **named, **plugins})
    return merged


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value`` pairs; names may be dotted, values are YAML.

    >>> parse_assignments(["method.sigma=50", "learning_rate=1e-2", "schedule.at=[5e-1, 0.75]"])
    {'method': {'sigma': 50}, 'learning_rate': 0.01, 'schedule': {'at': [0.5, 0.75]}}
    """
    layers = []
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise SpclError(f"expected name=value, found {assignment!r}; write, for example, method.sigma=50")
        layers.append(nested_settings(name, parse_value(text)))
    return merge_settings(*layers)


def parse_value(text: str) -> Any:
    """Parse the value of a setting: YAML, or else the text itself.

    >>> parse_value("[1e-3, null]"), parse_value("[conv")
    ([0.001, None], '[conv')
    """
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError):  # a ValueError of a wrong date
        return text


def split_values(text: str) -> list[str]:
    """Split a text of several values at its commas, except for commas in brackets or braces.

    >>> split_values("1, [crop, flip], {name: sgd, momentum: 0.9}")
    ['1', '[crop, flip]', '{name: sgd, momentum: 0.9}']
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def load_settings_file(path: str | Path) -> dict[str, Any]:
    """Read settings from a YAML or JSON file; a name that is given twice is an error.

    Recorded paths in the ``settings.json`` of a run start from its folder, see :func:`resolved_paths`.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeyLoader)
    except _DuplicateKeyError as error:
        raise SpclError(f"the settings {path} give {error}; keep one of them") from error
    except OSError as error:
        raise SpclError(f"cannot read the settings {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError of bytes that are no UTF-8, or of a wrong date
        raise SpclError(f"the settings {path} are neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise SpclError(f"the settings {path} must be names with values, but they are {type(content).__name__}")
    return resolved_paths(content, Path(path).parent) if Path(path).name == RECORD_NAME else content


RECORD_NAME = "settings.json"
"""The file in the folder of a run that records its settings."""


def portable_settings(settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Return settings as the ``settings.json`` in this folder records them: the folder can be moved with their files.

    Paths of files start from the folder (``./…``, ``../…``), unless all that file and folder have in common is the root
    of the file system, the home folder or a folder above it. If there are such paths, ``recorded_in`` is the folder.

    >>> settings = RunSettings(benchmark="/studies/mine/data.npz", protocol="/protocols/plan.json")
    >>> recorded = portable_settings(settings, Path("/studies/mine/runs/first"))
    >>> recorded["benchmark"], recorded["protocol"], recorded["recorded_in"]
    ('../../data.npz', '/protocols/plan.json', '/studies/mine/runs/first')
    """
    recorded, folder = settings.model_dump(mode="json"), folder.resolve()
    given = [*[(recorded, name) for name in FILES], *[(plugin, "name") for plugin in recorded["plugins"]]]
    found: dict[str, str] = {}
    for owner, name in given:
        if owner[name] is not None and Path(owner[name]).is_absolute():
            owner[name] = _portable(Path(owner[name]), folder)
            found |= {} if Path(owner[name]).is_absolute() else {RECORDED_IN: str(folder)}
    return recorded | found


def _portable(path: Path, folder: Path) -> str:
    """Return a path from the folder; the path itself where both have nothing of their own in common."""
    path = path.resolve()
    try:
        shared, home = Path(os.path.commonpath([path, folder])), Path.home().resolve()
    except (ValueError, RuntimeError):  # other drives; no home folder
        return str(path)
    if home.is_relative_to(shared):
        return str(path)
    relative = Path(os.path.relpath(path, folder)).as_posix()
    return relative if relative.startswith("../") else f"./{relative}"


RECORDED_IN = "recorded_in"
"""The key in a record for the folder that its relative paths started from."""


def resolved_paths(recorded: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings that are recorded in this folder, which may have been moved, with absolute paths.

    Data and protocol are looked for from the folder first, then from where the folder was. A plug-in is taken from
    where it was: what came along with a stranger's folder is not run unless it is named. A plug-in that is there no
    more gets a path from the working directory, which :func:`spcl.plugins.load_plugins` refuses in a record.

    >>> recorded = {"benchmark": "../../data.npz", "protocol": "plan.json"}
    >>> resolved_paths(recorded, Path("/studies/moved/runs/first"))
    {'benchmark': '/studies/moved/data.npz', 'protocol': 'plan.json'}
    """
    resolved = {name: value for name, value in recorded.items() if name != RECORDED_IN}
    before = recorded[RECORDED_IN] if _is_path(recorded.get(RECORDED_IN)) else ""
    for name in FILES & recorded.keys():
        if _is_path(value := recorded[name]) and value.startswith(("./", "../")):
            places = [os.path.normpath(Path(each, value)) for each in (folder.resolve(), before) if each]
            resolved[name] = next(filter(os.path.exists, places), places[0])
    if isinstance(plugins := recorded.get("plugins"), list):
        resolved["plugins"] = [_resolved_plugin(plugin, folder, before) for plugin in plugins]
    return resolved


def _is_path(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and "\0" not in value


def _resolved_plugin(plugin: Any, folder: Path, before: str) -> Any:
    """Return a recorded plug-in; its path is absolute only if it has no link in it, such as /proc/self/cwd."""
    if not isinstance(plugin, Mapping) or not _is_path(name := plugin.get("name")) or not name.endswith(".py"):
        return plugin
    path, here = os.path.normpath(Path(before, name)), folder / name
    is_where_it_was = Path(name).is_absolute() or Path(path).exists() or not here.exists()
    return {**plugin, "name": path if is_where_it_was and path == os.path.realpath(path) else os.path.relpath(here)}


def absolute_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the paths of settings absolute, so that they do not depend on the working directory.

    >>> absolute_paths({"benchmark": "ps-glyphs", "data_dir": Path("/data/../x"), "seed": 0})
    {'benchmark': 'ps-glyphs', 'data_dir': '/x', 'seed': 0}
    """
    paths = {name: Path(given[name]).expanduser() for name in FILES if isinstance(given.get(name), str | Path)}
    if isinstance(plugins := given.get("plugins"), list | tuple):
        given = {**given, "plugins": [_absolute_plugin(plugin) for plugin in plugins]}
    if "benchmark" in paths and (given["benchmark"] in PRESETS or not paths["benchmark"].exists()):
        del paths["benchmark"]
    return {**given, **{name: str(path.resolve()) for name, path in paths.items()}}


def _absolute_plugin(plugin: Any) -> Any:
    is_file = isinstance(plugin, str) and plugin.endswith(".py")
    return str(Path(plugin).expanduser().resolve()) if is_file else plugin


class _DuplicateKeyError(yaml.YAMLError):
    """A name that a mapping holds twice."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself keeps the last of several equal names."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and raise an error if it holds a name twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _DuplicateKeyError(f"{key.value!r} twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return node


_UniqueKeyLoader.add_implicit_resolver(  # JSON writes 1e-07, which YAML 1.1 reads as text
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("+-.0123456789")
)


def _union(below: Any, above: Any) -> list[Any]:
    """Return what is in either list of plug-ins; a text is a list of one.

    A file above stands for a recorded one below of the same name, wherever that was; the recorded checksum stays.
    """
    lists = [[given] if isinstance(given, str) else given or [] for given in (below, above)]
    for given in lists:
        if not isinstance(given, list | tuple):
            raise SpclError(f"settings: plugins is {given!r}; give a list of Python files or modules")
    both = list(lists[0])
    for plugin in lists[1]:
        same = [k for k, each in enumerate(both) if isinstance(each, Mapping) and _is_same_file(each, plugin)]
        if same:
            both[same[0]] = {**both[same[0]], "name": _absolute_plugin(_plugin_name(plugin))}
        else:
            both.append(plugin)
    return [item for index, item in enumerate(both) if item not in both[:index]]


def _plugin_name(plugin: Any) -> str:
    return str(plugin.get("name") if isinstance(plugin, Mapping) else plugin)


def _is_same_file(one: Any, other: Any) -> bool:
    first, second = Path(_plugin_name(one)), Path(_plugin_name(other))
    return first.suffix == ".py" and first.name == second.name


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _merge(below[name], above[name]) for name in above if _can_merge(below.get(name), above[name])}
    return {**below, **above, **inner}


def _can_merge(below: Any, above: Any) -> bool:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return False
    other_method = "name" in above and "name" in below and above["name"] != below["name"]
    return not other_method


# -- which settings make two runs the same run


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted name.

    >>> flat_settings({"seed": 0, "method": {"name": "er", "alpha": 0.0}})
    {'seed': 0, 'method.name': 'er', 'method.alpha': 0.0}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat_settings(value) if isinstance(value, Mapping) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": item for key, item in inner.items()}
    return flat


def nested_settings(name: str, value: Any) -> dict[str, Any]:
    """Return a setting of a dotted name as nested settings.

    >>> nested_settings("method.sigma", 50.0)
    {'method': {'sigma': 50.0}}
    """
    first, _, rest = name.partition(".")
    return {first: nested_settings(rest, value) if rest else value}


def decisive_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that identify a run: settings of the method by dotted name, options of other things as text.

    Files count by name alone, since they may be moved, and plug-ins by name and checksum.

    >>> decisive_settings({"seed": 0, "device": "cuda", "protocol": "/somewhere/ps-emnist.json"})
    {'seed': 0, 'protocol': 'ps-emnist.json'}
    >>> decisive_settings({"method": {"name": "er"}, "optimizer": {"name": "sgd", "momentum": 0.9}})
    {'method.name': 'er', 'optimizer': 'sgd(momentum=0.9)'}
    """
    written = {name: value if name == "method" else _written(name, value) for name, value in settings.items()}
    return {name: value for name, value in flat_settings(written).items() if name not in BOOKKEEPING}


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for readers: settings of the method by dotted name, lists and options of other things as text.

    Empty values become None.

    >>> augment = ["flip", {"name": "crop", "padding": 2}]
    >>> shown_settings({"method": {"name": "er"}, "augment": augment, "frozen": [], "data": {"size": 8}})
    {'method.name': 'er', 'augment': 'flip, crop(padding=2)', 'frozen': None, 'data': 'size=8'}
    """
    shown = {}
    for name, value in settings.items():
        written = _written(name, value) if isinstance(value, Mapping | list | tuple) and name != "method" else value
        shown[name] = ", ".join(map(str, written)) if isinstance(written, list) else written
    return {name: None if value == "" else value for name, value in flat_settings(shown).items()}


def _written(name: str, value: Any) -> Any:
    if name in FILES - BOOKKEEPING and isinstance(value, str):
        return Path(value).name
    if name == "plugins":
        return ", ".join(f"{Path(plugin['name']).name} ({plugin['sha256'][:12]})" for plugin in value)
    if isinstance(value, list | tuple):
        return [_written("", item) for item in value]
    if isinstance(value, Mapping):
        options = ", ".join(f"{key}={item}" for key, item in value.items() if key != "name")
        return f"{value['name']}({options})" if "name" in value else options
    return value


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first decisive setting that differs, with its two values, or None for the same run.

    >>> first_difference({"seed": 0, "method": {"name": "er"}}, {"seed": 0, "method": {"name": "soro"}})
    ('method.name', 'er', 'soro')
    >>> first_difference({"device": "cpu", "protocol": "/here/a.json"}, {"device": "cuda", "protocol": "/there/a.json"})
    """
    first, second = decisive_settings(one), decisive_settings(other)
    for name in second:
        if name in first and first[name] != second[name]:
            return name, first[name], second[name]
    return None


# -- every setting with its meaning, type and default


COMMENT = "<!-- Made from the settings' descriptions by: spcl settings --format markdown > docs/settings.md -->"
TYPES: Mapping[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null"}
WIDTH = 120
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Setting:
    """A setting: its name, the values it takes, its default as text, and what it means.

    >>> print(Setting("optimizer.momentum", "number", "0", ""))
    momentum=0
    """

    name: str
    values: str
    default: str
    meaning: str

    def __str__(self) -> str:
        """Return the last part of the name with the default, if there is one."""
        name = self.name.rpartition(".")[2]
        return f"{name}={self.default}" if self.default else name


def run_settings() -> dict[str, list[Setting]]:
    """Return the settings of a run by section: what is trained, how, and how it is executed."""
    sections: dict[str, list[Setting]] = {}
    for base in reversed(RunSettings.__mro__):
        own = vars(base).get("__annotations__", {})
        found = [_setting(name, RunSettings.model_fields[name]) for name in own if name in RunSettings.model_fields]
        if found:
            sections[(base.__doc__ or "").partition("\n")[0].rstrip(".")] = found
    return sections


def method_settings(name: str) -> list[Setting]:
    """Return the settings of a method, named as on the command line.

    >>> [setting.name for setting in method_settings("er")][5:8]
    ['method.head_init', 'method.finished_weight', 'method.replay_loss']
    """
    method = method_class(name)
    fields = method.Settings.model_fields
    listed = [_setting(f"method.{key}", field) for key, field in fields.items()]
    for replay_loss, kind in method.replay_losses.items():
        options = {key: field for key, field in kind.Options.model_fields.items() if key not in fields}
        for each in (_setting(f"method.{key}", field) for key, field in options.items()):
            listed.append(replace(each, meaning=f"with replay_loss={replay_loss}: {each.meaning}"))
    return listed


def named_settings() -> dict[str, list[tuple[str, str, list[Setting]]]]:
    """Return for the settings that name things of a kind: the names there are, their meanings and their options."""
    settings: dict[Registry[Any], list[str]] = {}
    for name, registry in {**NAMED, **LISTED}.items():
        settings.setdefault(registry, []).append(name)
    return {
        ", ".join(names): [(name, _summary(registry, name), _options(names[0], registry, name)) for name in registry]
        for registry, names in settings.items()
    }


def settings_page() -> str:
    """Return the page of all settings in Markdown."""
    parts = ["# Settings", COMMENT, INTRODUCTION]
    for title, settings in run_settings().items():
        parts += [f"## {title}", _table(settings)]
    parts += ["## Defaults of the benchmarks", _presets()]
    parts.append("## Things by name")
    for names, things in named_settings().items():
        parts.append(f"### {names}")
        parts.append("\n".join(_line(*thing) for thing in things))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
Every setting of a run, for `--set name=value`, for a settings file and for `spcl.runs.resolve_settings`. Defaults in
the section on network and batch [depend on the benchmark](#defaults-of-the-benchmarks). The settings of a method are
shown by `spcl settings METHOD` and on the page on [methods](methods.md). A setting that names a thing takes its name
alone, or its name and options: `optimizer=adamw`, `optimizer.weight_decay=0.01`, in a file `optimizer: {name: adamw,
weight_decay: 0.01}`."""


def _setting(name: str, field: FieldInfo) -> Setting:
    values = ", ".join(PRESET_SETTINGS) if name == "preset" else _values(field.annotation)
    bounds = [f"{BOUNDS[key]} {getattr(rule, key)}" for rule in field.metadata for key in BOUNDS if hasattr(rule, key)]
    default = "" if field.is_required() else _default(field.default)
    return Setting(name, " ".join([values, *bounds]), default, field.description or "")


def _values(annotation: Any) -> str:
    if annotation == Named:
        return "name, or name and options"
    if get_origin(annotation) is Annotated:
        return _values(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_values(part) for part in get_args(annotation))
    if get_origin(annotation) in (tuple, list):
        return f"list of ({_values(get_args(annotation)[0])})"
    if get_origin(annotation) is dict:
        return "names with values"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "text"
    return TYPES.get(annotation, "value")


def _default(default: Any) -> str:
    if isinstance(default, bool | NoneType):
        return {True: "true", False: "false", None: "null"}[default]
    if isinstance(default, tuple | list):
        return f"[{', '.join(map(str, default))}]"
    if isinstance(default, dict):
        return str(default.get("name", default))
    return str(default)


def _summary(registry: Registry[Any], name: str) -> str:
    return (inspect.getdoc(registry[name]) or "").partition("\n\n")[0].replace("\n", " ")


def _options(setting: str, registry: Registry[Any], name: str) -> list[Setting]:
    return [
        Setting(f"{setting}.{option}", "", "" if each.default is each.empty else _default(each.default), "")
        for option, each in registry.options(name).items()
    ]


def _table(settings: list[Setting]) -> str:
    rows = [f"| `{s.name}` | {s.values} | `{s.default}` | {s.meaning} |" for s in settings]
    return "\n".join(["| setting | values | default | meaning |", "|---|---|---|---|", *rows])


def _flow(value: Any) -> str:
    """Return a value as ``--set`` takes it."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False).removesuffix("...\n").strip()


def _presets() -> str:
    rows = [[name, *map(_flow, preset.model_dump().values())] for name, preset in PRESETS.items()]
    lines = [" | ".join(f"`{cell}`" for cell in row) for row in [["benchmark", *Preset.model_fields], *rows]]
    lines.insert(1, " | ".join(["---"] * len(rows[0])))
    more = [
        f"- `{name}` also: " + ", ".join(f"`{key}={_flow(value)}`" for key, value in benchmark.settings.items())
        for name, benchmark in SOURCE_BENCHMARKS.items()
        if benchmark.settings
    ]
    return "\n".join([*(f"| {line} |" for line in lines), "", *more])


def _line(name: str, summary: str, options: list[Setting]) -> str:
    shown = ", ".join(f"`{option}`" for option in map(str, options))
    text = f"- `{name}`: {summary.replace('``', '`')}" + (f" Options: {shown}." if shown else "")
    return "\n".join(wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
