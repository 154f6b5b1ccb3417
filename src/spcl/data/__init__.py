"""Data sets in their publishers' formats, the generated PS-Glyphs, custom data, and the PS-* protocols."""

from spcl.data.catalogue import DATA_NAMES, load_data
from spcl.data.custom import from_arrays, from_dataset
from spcl.data.custom_sources import from_sources
from spcl.data.image_data import ImageData
from spcl.data.inventory import DatasetStatus, check_data, get_data, list_data
from spcl.data.npz_file import from_npz
from spcl.data.paths import cache_dir
from spcl.data.picture_folder import from_folder
from spcl.data.presets import PRESETS, Preset, PresetName, preset_for
from spcl.data.protocol import (
    Configuration,
    Paradigm,
    Protocol,
    check_fit,
    draw_protocol,
    draw_timeline,
    fit,
    in_paradigm,
    load_protocol,
)
from spcl.data.published_protocol import convert_protocol
from spcl.data.registry import DATA
from spcl.data.source_data import Kind, Source, SourceData
from spcl.data.splits import hold_out

__all__ = [
    "DATA",
    "DATA_NAMES",
    "PRESETS",
    "Configuration",
    "DatasetStatus",
    "ImageData",
    "Kind",
    "Paradigm",
    "Preset",
    "PresetName",
    "Protocol",
    "Source",
    "SourceData",
    "cache_dir",
    "check_data",
    "check_fit",
    "convert_protocol",
    "draw_protocol",
    "draw_timeline",
    "fit",
    "from_arrays",
    "from_dataset",
    "from_folder",
    "from_npz",
    "from_sources",
    "get_data",
    "hold_out",
    "in_paradigm",
    "list_data",
    "load_data",
    "load_protocol",
    "preset_for",
]
