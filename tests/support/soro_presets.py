"""The two published sets of settings of SORO, for its tests."""

import pytest

from spcl.aggregation import SOROSettings

PAPER = SOROSettings.paper(sigma=100.0, lambda_=100.0, eta=1.0 / 802.0, iterations=100, tolerance=1e-3)
RELEASED = SOROSettings.released(cutoff=2.0**-52)  # the references have full rank
PRESETS = pytest.mark.parametrize("preset", [PAPER, RELEASED], ids=["paper", "released"])
LENGTH = 200
"""Parameters of a model, i.e. numbers in a gradient."""
