"""Loading the data that the settings of a run name."""

from pathlib import Path
from typing import Any

from spcl.data import DATA, DATA_NAMES, PRESETS, ImageData, SourceData, from_folder, from_npz, load_data
from spcl.errors import DataError
from spcl.runs.settings import RunSettings
from spcl.suggestions import did_you_mean

__all__ = ["check_data", "is_named_data", "load_benchmark"]

FOLDER_OPTIONS = ("size", "mode")


def load_benchmark(benchmark: str, data_dir: str | None = None, **options: Any) -> ImageData | SourceData:
    """Load data by name or path.

    Args:
        benchmark: a known benchmark, a data set of a plug-in, a folder of pictures, or an .npz file.
        data_dir: where the files of known benchmarks are.
        options: ``size`` and ``mode`` of a folder of pictures, or the options of a plug-in's data set.

    >>> load_benchmark("ps-glyphs", size=64)
    Traceback (most recent call last):
    spcl.errors.DataError: the data ps-glyphs has no option 'size'; leave it out
    """
    path = Path(benchmark).expanduser()
    if benchmark in PRESETS:
        _check_options(benchmark, options)
        return load_data(benchmark, data_dir)
    if not (_is_path(benchmark) or path.exists()):
        return _load_named(benchmark, data_dir, options)
    if path.is_dir():
        _check_options(benchmark, options, FOLDER_OPTIONS)
        return from_folder(path, **options)
    if path.suffix == ".npz" and path.exists():
        _check_options(benchmark, options)
        return from_npz(path)
    fault = "is neither a folder nor an .npz file" if path.exists() else "does not exist"
    raise DataError(
        f"the data {benchmark} {fault}; give a folder of pictures, an .npz file or one of {', '.join(PRESETS)}"
    )


def is_named_data(benchmark: str) -> bool:
    """Return whether the text is the name of a known benchmark or of a plug-in's data set, or a path.

    >>> is_named_data("ps-emnist"), is_named_data("/data/pictures"), is_named_data("custom")
    (True, True, False)
    """
    return benchmark in PRESETS or _is_path(benchmark) or benchmark in DATA


def check_data(settings: RunSettings, data: ImageData | SourceData | None) -> None:
    """Raise an error unless the data is that which the settings name, or they name data that can be loaded."""
    if data is None and not is_named_data(settings.benchmark) and not Path(settings.benchmark).exists():
        raise DataError(
            f"the data {settings.benchmark!r} is no known benchmark, no path and no data set of a plug-in; if it came "
            f"from Python, pass it again as data="
        )
    if data is not None and data.name != settings.benchmark:
        raise DataError(
            f"the settings are for the data {settings.benchmark!r}, but the data given is {data.name!r}; "
            f"make them with resolve_settings(…, data=data)"
        )
    if data is not None and settings.data:
        raise DataError(f"data is given, but so are options of its loader ({', '.join(settings.data)}); leave them out")


def _is_path(benchmark: str) -> bool:
    path = Path(benchmark).expanduser()
    return "/" in benchmark or len(path.parts) > 1 or path.suffix == ".npz"


def _load_named(name: str, data_dir: str | None, options: dict[str, Any]) -> ImageData | SourceData:
    """Make a plug-in's data set."""
    if name not in DATA:
        hint = did_you_mean(name, [*DATA_NAMES, *DATA])
        raise DataError(f"unknown data set {name!r}, and there is no such file or folder in {Path.cwd()}; {hint}")
    data = DATA.make({"name": name, **options}, data_dir=data_dir)
    if not isinstance(data, ImageData | SourceData):
        raise DataError(f"the data set {name!r} must be ImageData or SourceData, but it is {type(data).__name__}")
    return data


def _check_options(benchmark: str, options: dict[str, Any], known: tuple[str, ...] = ()) -> None:
    for option in options:
        if option not in known:
            hint = f"choose from {', '.join(known)}" if known else "leave it out"
            raise DataError(f"the data {benchmark} has no option {option!r}; {hint}")
