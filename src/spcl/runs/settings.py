"""The settings of a run: complete, typed, strict about unknown names, and written beside its results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from spcl.data.presets import PRESETS, BackboneName, Preset, PresetName, preset_for
from spcl.data.protocol import Paradigm
from spcl.errors import SpclError
from spcl.learner import Scenario
from spcl.methods import make_method
from spcl.runs.problem import load_benchmark
from spcl.validation import validated

__all__ = ["RunSettings", "absolute_paths", "load_settings_file", "parse_assignments", "resolve_settings"]

PATHS = ("benchmark", "protocol", "data_dir")


class RunSettings(BaseModel):
    """Everything that decides a run. ``settings.json`` of a run folder holds one of these, and can be run again."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    benchmark: str = Field("ps-glyphs", description="a known benchmark, a folder of pictures or an .npz file")
    preset: PresetName = Field("default", description="default, or paper: network details as published")
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

    tasks: int = Field(5, ge=1, description=Preset.model_fields["tasks"].description)
    batch_size: int = Field(128, ge=1, description=Preset.model_fields["batch_size"].description)
    memory_budget: int = Field(0, ge=0, description=Preset.model_fields["memory_budget"].description)
    backbone: BackboneName = Field("cnn", description=Preset.model_fields["backbone"].description)
    learning_rate: float = Field(1e-3, gt=0.0, description="of the optimiser")
    batch_norm_momentum: float = Field(
        0.1, gt=0.0, le=1.0, description=Preset.model_fields["batch_norm_momentum"].description
    )
    optimizer: Literal["adam", "sgd"] = Field("adam", description="adam or sgd")
    memory: Literal["balanced", "reservoir"] = Field("balanced", description="the rehearsal policy")
    validation: float = Field(
        0.0, ge=0.0, lt=1.0, description="evaluate on this part of the training data instead of the test data"
    )

    evaluate: Literal["ended", "seen"] = Field("seen", description="when a task ends: it alone, or every task seen")
    evaluate_every: int | None = Field(None, ge=1, description="evaluate also every so many steps")
    record_every: int = Field(1, ge=1, description="write losses and stability every so many steps")
    stability: bool = Field(True, description="measure κ, conflicts and magnitude similarity for every method")
    checkpoint_seconds: float = Field(60.0, ge=0.0, description="save at least so often; 0 saves every step")
    device: str = Field("auto", description="auto, cpu, cuda, …")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of forward and backward passes")
    capture: bool = Field(True, description="on a GPU, replay CUDA graphs instead of launching every kernel")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; PyTorch's choice if not given")
    data_dir: str | None = Field(None, description="where the publishers' files are")


def resolve_settings(*layers: Mapping[str, Any]) -> RunSettings:
    """The settings from layers of increasing precedence, over the preset of their benchmark; all of it validated.

    >>> resolve_settings({"benchmark": "ps-emnist"}, {"method": {"name": "er"}}).learning_rate
    0.003
    >>> resolve_settings({"scenarios": "task"})
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: settings: there is no setting 'scenarios'; did you mean 'scenario'?
    """
    given: dict[str, Any] = {"method": RunSettings.model_fields["method"].default}
    for layer in layers:
        given = _merged(given, layer)
    given = absolute_paths(given)
    benchmark, preset = given.get("benchmark", "ps-glyphs"), given.get("preset", "default")
    first = validated(RunSettings, given, "settings")
    data = None if benchmark in PRESETS else load_benchmark(benchmark, first.data_dir)
    chosen = preset_for(benchmark, preset, data).model_dump()
    settings = validated(RunSettings, chosen | given, "settings")
    method = dict(settings.method)
    name = method.pop("name", None)
    if not isinstance(name, str):
        raise SpclError(f"settings: method needs a name, but it is {settings.method}; 'spcl methods' lists them")
    complete = {"name": name, **make_method(name, **method).settings.model_dump(mode="json")}
    return settings.model_copy(update={"method": complete})


def parse_assignments(assignments: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """``name=value`` pairs, as given by an option; names may be dotted, values are YAML.

    >>> parse_assignments(["method.sigma=50", "learning_rate=1e-2"])
    {'method': {'sigma': 50}, 'learning_rate': 0.01}
    """
    result: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise SpclError(f"{option} takes name=value, but got {assignment!r}; for example {option} method.sigma=50")
        *parents, last = name.split(".")
        inner: dict[str, Any] = {last: _value(text)}
        for parent in reversed(parents):
            inner = {parent: inner}
        result = _merged(result, inner)
    return result


def load_settings_file(path: Path) -> dict[str, Any]:
    """Settings from a YAML or JSON file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpclError(f"cannot read the settings {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpclError(f"the settings {path} are neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise SpclError(f"the settings {path} must be names with values, but they are {type(content).__name__}")
    return content


def _value(text: str) -> Any:
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)  # YAML takes 1e-3 for a text
    except ValueError:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        mine = result.get(name)
        if isinstance(value, Mapping) and isinstance(mine, Mapping) and not _changes_method(mine, value):
            result[name] = _merged(mine, value)
        else:
            result[name] = value
    return result


def absolute_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with absolute paths, so that they mean the same from everywhere; a benchmark may be one.

    >>> absolute_paths({"benchmark": "ps-glyphs", "data_dir": Path("/data/../x"), "seed": 0})
    {'benchmark': 'ps-glyphs', 'data_dir': '/x', 'seed': 0}
    """
    paths = {name: Path(given[name]).expanduser() for name in PATHS if isinstance(given.get(name), str | Path)}
    if "benchmark" in paths and (given["benchmark"] in PRESETS or not paths["benchmark"].exists()):
        del paths["benchmark"]
    return {**given, **{name: str(path.resolve()) for name, path in paths.items()}}


def _changes_method(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Another method's settings do not carry over."""
    return "name" in above and "name" in below and above["name"] != below["name"]


def settings_text(settings: RunSettings) -> str:
    """The settings as JSON."""
    return json.dumps(settings.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
