"""Data sets in their publishers' formats, the generated PS-Glyphs, custom data, and the PS-* protocols."""

from spcl.data.cache import cache_dir
from spcl.data.catalogue import (
    DATA_NAMES,
    PRESET_SETTINGS,
    PRESETS,
    DatasetStatus,
    Preset,
    check_data,
    get_data,
    list_data,
    load_data,
    preset_for,
)
from spcl.data.custom import from_arrays, from_dataset, from_folder, from_npz, from_sources
from spcl.data.protocol import (
    PROTOCOL_FORMATS,
    Configuration,
    Paradigm,
    Protocol,
    check_fit,
    convert_protocol,
    draw_protocol,
    draw_timeline,
    fit,
    in_paradigm,
    load_protocol,
)
from spcl.data.samples import DATA, ImageData, SourceData, SourceSamples, hold_out
from spcl.tasks import Kind

__all__ = [
    "DATA",
    "DATA_NAMES",
    "PRESETS",
    "PRESET_SETTINGS",
    "PROTOCOL_FORMATS",
    "Configuration",
    "DatasetStatus",
    "ImageData",
    "Kind",
    "Paradigm",
    "Preset",
    "Protocol",
    "SourceData",
    "SourceSamples",
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
