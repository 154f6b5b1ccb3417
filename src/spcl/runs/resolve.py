"""Complete settings: layers over the preset of their benchmark, with all settings of the method."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spcl.data import PRESETS, ImageData, SourceData, load_protocol, preset_for
from spcl.errors import SpclError
from spcl.methods import make_method, recorded_settings
from spcl.plugins import load_plugins
from spcl.registry import named_options
from spcl.runs.build import make_optimizer
from spcl.runs.devices import check_device
from spcl.runs.folder import FolderError, RunFolder
from spcl.runs.loading import check_data, is_named_data, load_benchmark
from spcl.runs.plus import plus_settings
from spcl.runs.released import released_settings
from spcl.runs.settings import LISTED, NAMED, RunSettings, absolute_paths, load_settings_file, merge_settings
from spcl.schedules import SCHEDULES
from spcl.trackers import TRACKERS, check_installed
from spcl.transforms import compose
from spcl.validation import validated

__all__ = ["resolve_settings", "resume_settings"]


def resolve_settings(*layers: Mapping[str, Any], data: ImageData | SourceData | None = None) -> RunSettings:
    """Merge layers of increasing precedence over the preset of their benchmark, and validate the result.

    The name of ``data``, which comes from Python and is then passed to :func:`execute` as well, is the benchmark.

    Custom data is loaded, since its preset depends on its shape, size and number of classes. The batch size of a
    protocol file, to which its timelines fit, precedes that of the preset.

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
        check_data(first, data)
    elif first.benchmark not in PRESETS:
        data = load_benchmark(first.benchmark, first.data_dir, **first.data)
    tasks = first.tasks if "tasks" in given else None
    preset = preset_for(first.benchmark, first.preset, data, tasks=tasks).model_dump()
    if first.protocol is not None and "batch_size" not in given:
        preset["batch_size"] = load_protocol(Path(first.protocol)).batch_size
    settings = validated(RunSettings, _merged(first.preset, defaults, preset, given), "settings")
    _check(settings)
    return settings.model_copy(update={"method": _complete_method(settings.method)})


def resume_settings(out: str | Path, data: ImageData | SourceData | None = None) -> RunSettings:
    """Return the settings of the run in this folder; ``data`` is needed where it came from Python."""
    folder = RunFolder(out)
    if not folder.settings.exists():
        raise FolderError(f"there is no run in {out} to resume; start one first")
    recorded = load_settings_file(folder.settings)
    recorded["method"] = recorded_settings(recorded["method"])
    load_plugins(recorded.get("plugins", ()))
    benchmark = str(recorded.get("benchmark"))
    if data is None and not is_named_data(benchmark):
        raise FolderError(
            f"the data {benchmark!r} of the run in {out} came from Python; resume it there, with "
            f"execute(settings, out, resume=True, data=…)"
        )
    return resolve_settings(recorded, data=data)


def _merged(preset: str, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of settings; below the last, given by the user, are those of ``plus`` or ``released`` if chosen."""
    merged = merge_settings(*layers)
    if preset == "plus":
        _method_name(merged["method"])
        return merge_settings(*layers[:-1], plus_settings(merged), layers[-1])
    if preset == "released":
        method = _method_name(merged["method"])
        return merge_settings(*layers[:-1], released_settings(merged["backbone"], method), layers[-1])
    return merged


def _check(settings: RunSettings) -> None:
    """Raise an error for names and options that there are not, and for settings that contradict each other.

    What is made without the data is made, so that its own checks of options are passed, too.
    """
    for name, registry in NAMED.items():
        registry.check(getattr(settings, name))
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
