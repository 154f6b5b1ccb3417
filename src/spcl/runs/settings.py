"""The settings of a run: complete, typed and strict about unknown names; layers of settings and their parsing."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from spcl.data.presets import PRESETS, Preset, PresetName
from spcl.data.protocol import Paradigm
from spcl.errors import SpclError
from spcl.learner import Scenario
from spcl.learner.predictors import PREDICTORS
from spcl.losses import LOSSES
from spcl.memory import MEMORIES
from spcl.methods import recorded_settings
from spcl.models import BACKBONES
from spcl.optimizers import OPTIMIZERS
from spcl.plugins import Plugin
from spcl.registry import Named, Registry
from spcl.runs.identity import nested_settings
from spcl.schedules import SCHEDULES
from spcl.trackers import TRACKERS
from spcl.transforms import TRANSFORMS

__all__ = [
    "LISTED",
    "NAMED",
    "RunSettings",
    "absolute_paths",
    "load_settings_file",
    "merge_settings",
    "parse_assignments",
    "parse_value",
    "split_values",
    "with_defaults",
]

PATHS = ("benchmark", "protocol", "data_dir")

NAMED: dict[str, Registry[Any]] = {
    "backbone": BACKBONES,
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
    """Problem: data, scenario, method, label set and timeline."""

    plugins: tuple[Plugin, ...] = Field((), description="Python files or modules that add methods, backbones and more")
    benchmark: str = Field("ps-glyphs", description="a known benchmark, a path to your data, or a plug-in's data set")
    data: dict[str, Any] = Field(
        default={},
        description="options of the data's loader: size and mode of a folder of pictures, or those of a plug-in's data "
        "set",
    )
    preset: PresetName = Field(
        "default",
        description="default; plus: more samples of memory, updates, augmentation and averaged weights; paper: "
        "batch-norm's momentum as published; released: all that the published code does",
    )
    scenario: Scenario = Field("task", description="task- or class-incremental")
    method: dict[str, Any] = Field(default={"name": "soro"}, description="its name, and its own settings")

    config: int = Field(0, ge=0, description="which label set and timeline: 3 × label set + timeline")
    seed: int = Field(0, ge=0, lt=2**32, description="of the weights, the order of the data and the memory")
    protocol: str | None = Field(None, description="a protocol file; drawn by protocol_seed if not given")
    protocol_seed: int = Field(0, ge=0, description="of the label sets and timelines")
    fit: bool = Field(False, description="rescale a timeline that does not fit the data")
    paradigm: Paradigm = Field("parallel", description="parallel, joint (all tasks at once) or serial (one by one)")
    overlap: float = Field(1.0, ge=0.0, le=1.0, description="how much tasks may overlap, when the protocol is drawn")
    gap: int = Field(0, ge=0, description="how many idle steps may come between tasks, when the protocol is drawn")
    epochs: int = Field(1, ge=1, description="passes of every task over its samples; timelines are stretched by it")


class _TrainingSettings(BaseModel):
    """Training."""

    optimizer: Named = Field("adam", description="adam, adamw, sgd, …: its name, and its own options")
    schedule: Named = Field("constant", description="of the learning rate over the steps of the run")
    clip_norm: float | None = Field(None, gt=0.0, description="largest norm of an update before the optimiser's step")
    loss: Named = Field("cross-entropy", description="of classification tasks")
    regression_loss: Named = Field("mse", description="of regression tasks")
    multilabel_loss: Named = Field("binary-cross-entropy", description="of multi-label tasks")
    normalise: bool = Field(
        True, description="standardise images by mean and deviation of the training data; if not, they are in 0…1"
    )
    augment: tuple[Named, ...] = Field((), description="random transforms of new and of replayed samples, in order")
    memory: Named = Field(
        "balanced", description="which samples are kept for replay, and how they are drawn: balanced, reservoir, …"
    )
    memory_batch: int | None = Field(None, ge=1, description="samples replayed per step; batch_size if not given")
    updates: int = Field(1, ge=1, description="updates per step, on the same batches and on other samples of memory")
    average: float | None = Field(
        None, ge=0.0, lt=1.0, description="decay of an average of the weights over updates, which then predicts"
    )
    predict_by: Named = Field(
        "head", description="what predicts classes: the trained heads, or heads made from memory: class-means, …"
    )
    frozen: tuple[str, ...] = Field((), description="patterns of names of backbone parameters that are not trained")
    unfreeze_after: int | None = Field(None, ge=0, description="train frozen parameters, too, after this many steps")


class _ExecutionSettings(BaseModel):
    """Evaluation, records and hardware."""

    validation: float = Field(
        0.0, ge=0.0, lt=1.0, description="evaluate on this part of the training data instead of the test data"
    )

    evaluate: Literal["ended", "seen"] = Field("seen", description="when a task ends: it alone, or every task seen")
    evaluate_every: int | None = Field(None, ge=1, description="also evaluate every this many steps")
    record_every: int = Field(1, ge=1, description="write losses and stability every this many steps")
    stability: bool = Field(True, description="measure κ, conflicts and magnitude similarity for every method")
    checkpoint_seconds: float = Field(60.0, ge=0.0, description="longest time between checkpoints; 0 saves every step")
    device: str = Field("auto", description="auto, cpu, cuda, …")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of forward and backward passes")
    capture: bool = Field(True, description="on a GPU, replay CUDA graphs instead of launching every kernel")
    low_memory: Literal["auto"] | bool = Field(
        "auto", description="hold no gradients, only their Gramian, for two backward passes; auto: if they do not fit"
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; PyTorch's choice if not given")
    data_dir: str | None = Field(None, description="where the publishers' files are")
    keep_model: bool = Field(True, description="keep the trained model in model.safetensors")
    trackers: tuple[Named, ...] = Field((), description="where to report: tensorboard, wandb, …")


class RunSettings(_ExecutionSettings, _TrainingSettings, Preset, _ProblemSettings):
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
    def _without_options(cls, value: Named) -> Named:
        """Record a name without options as the name alone."""
        return value["name"] if isinstance(value, dict) and value.keys() == {"name"} else value


def with_defaults(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings, with the defaults of those that the version that made the record did not have.

    Settings whose default depends on the benchmark are not added.

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
    """Split a text of several values at its commas, but not at those in brackets or braces.

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
    """Read settings from a YAML or JSON file; a name that is given twice is an error."""
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
    return content


def absolute_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the paths of settings absolute, so that they do not depend on the working directory.

    >>> absolute_paths({"benchmark": "ps-glyphs", "data_dir": Path("/data/../x"), "seed": 0})
    {'benchmark': 'ps-glyphs', 'data_dir': '/x', 'seed': 0}
    """
    paths = {name: Path(given[name]).expanduser() for name in PATHS if isinstance(given.get(name), str | Path)}
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
    """Return what is in either list of plug-ins; a text is a list of one."""
    lists = [[given] if isinstance(given, str) else given or [] for given in (below, above)]
    for given in lists:
        if not isinstance(given, list | tuple):
            raise SpclError(f"settings: plugins is {given!r}; give a list of Python files or modules")
    both = [plugin for given in lists for plugin in given]
    return [item for index, item in enumerate(both) if item not in both[:index]]


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _merge(below[name], above[name]) for name in above if _can_merge(below.get(name), above[name])}
    return {**below, **above, **inner}


def _can_merge(below: Any, above: Any) -> bool:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return False
    other_method = "name" in above and "name" in below and above["name"] != below["name"]
    return not other_method
