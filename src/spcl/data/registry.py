"""Data sets of plug-ins, by name."""

from collections.abc import Callable

from spcl.data.image_data import ImageData
from spcl.data.source_data import SourceData
from spcl.registry import Registry

__all__ = ["DATA"]

DATA: Registry[Callable[..., ImageData | SourceData]] = Registry("data set", keywords=("data_dir",))
"""Factories of data sets; their parameters are options, but for ``data_dir``, which is the folder of data files."""
