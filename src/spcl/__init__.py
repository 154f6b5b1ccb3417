"""Stable parallel continual learning: one model, many data sources, tasks that come and go."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("spcl")
