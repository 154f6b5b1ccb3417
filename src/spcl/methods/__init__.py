"""Methods for parallel continual learning, one file each."""

from spcl.methods.er import ER
from spcl.methods.registry import METHODS, make_method
from spcl.methods.soro import SORO, SORODBT

__all__ = ["ER", "METHODS", "SORO", "SORODBT", "make_method"]
