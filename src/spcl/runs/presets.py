"""Complete settings: layers over the preset of their benchmark; the preset ``plus``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spcl._util.registry import named_options
from spcl._util.validation import validated
from spcl.data import PRESET_SETTINGS, PRESETS, SOURCE_BENCHMARKS, ImageData, SourceData, load_protocol, preset_for
from spcl.errors import SpclError
from spcl.methods import make_method, recorded_settings
from spcl.plugins import load_plugins, load_recorded_plugins
from spcl.runs.build import check_device, check_given_data, is_named_data, load_benchmark, make_optimizer
from spcl.runs.records import FolderError, RunFolder
from spcl.runs.settings import FILES, LISTED, NAMED, RunSettings, absolute_paths, load_settings_file, merge_settings
from spcl.schedules import SCHEDULES
from spcl.trackers import TRACKERS, check_installed
from spcl.transforms import compose


def resolve_settings(*layers: Mapping[str, Any], data: ImageData | SourceData | None = None) -> RunSettings:
    """Merge layers of increasing precedence over the preset of their benchmark, and validate the result.

    The name of ``data``, which comes from Python and is then passed to :func:`execute` as well, is the benchmark.

    Custom data is loaded, since its preset depends on its shape, size and number of classes. The timelines of a
    protocol file fit its batch size, which precedes the batch size of the preset.

    >>> resolve_settings({"benchmark": "ps-emnist"}, {"method": {"name": "er"}}).learning_rate
    0.003
    >>> resolve_settings({"scenarios": "task"})
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: settings: there is no setting 'scenarios'; did you mean 'scenario'?
    """
    defaults = {name: RunSettings.model_fields[name].default for name in ("method", *NAMED)}
    named = {} if data is None else {"benchmark": data.name}
    given = absolute_paths(named | merge_settings(*layers))
    if data is not None and Path(given["benchmark"]) == Path(data.name).resolve():
        given |= named  # a folder of the same name is not meant
    given["plugins"] = load_plugins(given.get("plugins", ()))
    first = validated(RunSettings, given, "settings")
    if data is not None:
        check_given_data(first, data)
    elif first.benchmark not in PRESETS:
        data = load_benchmark(first.benchmark, first.data_dir, **first.data)
    tasks = first.tasks if "tasks" in given else None
    preset = preset_for(first.benchmark, data, tasks=tasks).model_dump()
    if first.benchmark in SOURCE_BENCHMARKS:
        preset |= SOURCE_BENCHMARKS[first.benchmark].settings
    if first.protocol is not None and "batch_size" not in given:
        preset["batch_size"] = load_protocol(Path(first.protocol)).batch_size
    settings = validated(RunSettings, _merged(first.preset, defaults, preset, given), "settings")
    _check(settings)
    return settings.model_copy(update={"method": _complete_method(settings.method)})


MOVABLE = ("plugins", *FILES)
"""Settings that may be given again where a run was recorded on another machine."""


def resume_settings(
    out: str | Path, data: ImageData | SourceData | None = None, *, moved: Mapping[str, Any] | None = None
) -> RunSettings:
    """Return the settings of the run in this folder.

    Args:
        out: the folder.
        data: needed where the data came from Python.
        moved: where its plug-ins, data and protocol are now: ``plugins``, ``benchmark``, ``data_dir``, ``protocol``.
    """
    folder = RunFolder(out)
    if not folder.settings.exists():
        raise FolderError(f"there is no run in {out} to resume; start one first")
    recorded = load_settings_file(folder.settings)
    recorded["method"] = recorded_settings(recorded["method"])
    recorded = merge_settings(recorded, absolute_paths(moved or {}))
    load_recorded_plugins(recorded.get("plugins", ()), folder.settings)
    benchmark = str(recorded.get("benchmark"))
    if data is None and not is_named_data(benchmark):
        raise FolderError(
            f"the data {benchmark!r} of the run in {out} came from Python; resume it there, with "
            f"execute(settings, out, resume=True, data=…)"
        )
    return resolve_settings(recorded, data=data)


def _merged(preset: str, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of settings; below the last, given by the user, is what the preset sets."""
    merged = merge_settings(*layers)
    _method_name(merged["method"])
    return merge_settings(*layers[:-1], PRESET_SETTINGS[preset](merged), layers[-1])


def _check(settings: RunSettings) -> None:
    """Raise an error for names and options that there are not, and for settings that contradict each other.

    What is made without the data is made, so that its own checks of options are passed, too.
    """
    for name, registry in NAMED.items():
        if (value := getattr(settings, name)) is not None:
            registry.check(value)
    for name, registry in LISTED.items():
        for setting in getattr(settings, name):
            registry.check(setting)
    check_device(settings.device)
    if not isinstance(settings.optimizer, str):  # without options there is nothing to check, which takes a second
        make_optimizer(settings, [nn.Parameter(torch.zeros(1, 1))])
    SCHEDULES.make(settings.schedule, 1)
    compose(settings.augment)
    for tracker in settings.trackers:
        if library := getattr(TRACKERS[named_options(tracker, "tracker")[0]], "requires", None):
            check_installed(library)
    if settings.unfreeze_after is not None and not settings.frozen:
        raise SpclError(
            f"settings: unfreeze_after = {settings.unfreeze_after}, but nothing is frozen; give patterns as frozen"
        )


def _complete_method(method: Mapping[str, Any]) -> dict[str, Any]:
    name = _method_name(method)
    return {"name": name, **make_method(**method).settings.model_dump(mode="json")}


def _method_name(method: Mapping[str, Any]) -> str:
    name = method.get("name")
    if not isinstance(name, str):
        raise SpclError(f"settings: method needs a name, but it is {dict(method)}; 'spcl methods' lists them")
    return name


# -- preset plus: more replay, for any method


PHOTOGRAPHS = frozenset({"ps-cifar100", "ps-tiny-imagenet", "toy-cifar10"})
"""Benchmarks whose images keep their class when they are shifted and flipped, unlike characters."""


@dataclass(frozen=True)
class Replay:
    """How much is replayed, and how: settings of the run, and of those methods that have them.

    Attributes:
        batches: replay batches of an update.
        updates: updates of a step.
        rate: factor of the benchmark's learning rate.
        augment: transforms of all samples.
        class_predictor: what predicts class-incrementally.
        method: settings of the method.
        average: decay of the averaged weights.
        encoder: in front of the network, one for each source.
    """

    batches: int
    updates: int
    rate: float
    augment: tuple[str, ...]
    class_predictor: str
    method: Mapping[str, float]
    average: float = 0.995
    encoder: str | None = None


AUGMENTED = Replay(
    batches=4,
    updates=8,
    rate=2.5,
    augment=("crop", "flip"),
    class_predictor="class-means",
    method={"memory_share": 0.5, "logit_weight": 0.2, "finished_weight": 1.0},
)
"""Every update replays other samples; stored logits count less, because they belong to one augmented view alone.

They were searched before ``finished_weight`` existed.
"""

REPEATED = Replay(
    batches=1,
    updates=3,
    rate=1 / 3,
    augment=(),
    class_predictor="head",
    method={"logit_weight": 2.0},
)
"""Few samples, replayed unchanged, are learned by heart; smaller updates and stored logits prevent it."""

PER_WEARER = Replay(
    batches=4,
    updates=1,
    rate=1.0,
    augment=(),
    class_predictor="head",
    method={},
    average=0.99,
    encoder="affine",
)
"""Every source has a scale and shift of its own in front of the network; runs of a few steps need a short average."""


@PRESET_SETTINGS.register("plus")
def plus_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the preset ``plus`` adds to the settings of the benchmark, given the settings without it.

    Each is an ordinary setting that a user can set alone.

    >>> given = {"benchmark": "ps-emnist", "batch_size": 128, "memory_budget": 310, "scenario": "class"}
    >>> plus_settings(given | {"learning_rate": 0.003, "method": {"name": "spcl"}})
    {'memory_batch': 128, 'updates': 3, 'learning_rate': 0.001, 'average': 0.995, 'augment': [], 'predict_by': 'head',
     'method': {'name': 'spcl', 'logit_weight': 2.0}}
    """
    replay = _replay_of(settings["benchmark"])
    by_class = settings.get("scenario") == "class" and settings["memory_budget"]
    known = type(make_method(**settings["method"]).settings).model_fields
    return {
        "memory_batch": replay.batches * settings["batch_size"],
        "updates": replay.updates,
        "learning_rate": replay.rate * settings["learning_rate"],
        "average": replay.average,
        "augment": list(replay.augment),
        **({} if replay.encoder is None else {"encoder": replay.encoder}),
        "predict_by": replay.class_predictor if by_class else "head",
        "method": {
            "name": settings["method"]["name"],
            **{name: value for name, value in replay.method.items() if name in known},
        },
    }


def _replay_of(benchmark: str) -> Replay:
    if benchmark in PHOTOGRAPHS:
        return AUGMENTED
    return PER_WEARER if benchmark == "ps-wisdm" else REPEATED
