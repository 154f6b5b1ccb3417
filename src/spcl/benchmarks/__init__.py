"""Data sets in their publishers' formats, the embedded PS-Glyphs, and your own data as `ImageData`."""

from spcl.benchmarks.catalogue import DATA_NAMES, load_data
from spcl.benchmarks.image_data import ImageData
from spcl.benchmarks.inventory import Stock, check_data, get_data, list_data
from spcl.benchmarks.own import from_arrays, from_dataset, from_folder
from spcl.benchmarks.places import cache_dir
from spcl.benchmarks.presets import PRESETS, Preset, preset_for
from spcl.benchmarks.protocol import (
    Configuration,
    Protocol,
    check_fit,
    draw_protocol,
    fit,
    in_paradigm,
    load_protocol,
)

__all__ = [
    "DATA_NAMES",
    "PRESETS",
    "Configuration",
    "ImageData",
    "Preset",
    "Protocol",
    "Stock",
    "cache_dir",
    "check_data",
    "check_fit",
    "draw_protocol",
    "fit",
    "from_arrays",
    "from_dataset",
    "from_folder",
    "get_data",
    "in_paradigm",
    "list_data",
    "load_data",
    "load_protocol",
    "preset_for",
]
