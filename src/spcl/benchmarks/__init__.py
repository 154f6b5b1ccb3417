"""Data sets in their publishers' formats, the embedded PS-Glyphs, and your own data as `ImageData`."""

from spcl.benchmarks.catalogue import DATA_NAMES, load_data
from spcl.benchmarks.image_data import ImageData
from spcl.benchmarks.inventory import Stock, check_data, get_data, list_data
from spcl.benchmarks.own import from_arrays, from_dataset, from_folder
from spcl.benchmarks.places import cache_dir

__all__ = [
    "DATA_NAMES",
    "ImageData",
    "Stock",
    "cache_dir",
    "check_data",
    "from_arrays",
    "from_dataset",
    "from_folder",
    "get_data",
    "list_data",
    "load_data",
]
