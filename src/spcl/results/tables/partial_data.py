"""How much of a published data set runs had."""

from collections.abc import Iterable
from fractions import Fraction

from spcl.data.catalogue import DATA_SETS
from spcl.results.records import CompleteRun

__all__ = ["data_share", "partial_data"]

LARGEST_DENOMINATOR = 10


def partial_data(runs: Iterable[CompleteRun]) -> str:
    """Return how much of a published data set these runs had; empty if all of it."""
    for run in runs:
        published, data = DATA_SETS.get(run.benchmark), run.result.data
        if published is None or data is None:
            continue
        found = {"training": (data.train, published.train), "test": (data.test, published.test)}
        if run.settings.get("validation"):  # then the test samples are held-out training samples
            found = {"training": (data.train + data.test, published.train)}
        parts = [f"{own:,} {kind} samples, not {whole:,}" for kind, (own, whole) in found.items() if own != whole]
        if parts:
            return ", and ".join(parts)
    return ""


def data_share(run: CompleteRun) -> str:
    """Return the share of a published data set that a run trained on in a few words, and empty where it is unknown."""
    published, data = DATA_SETS.get(run.benchmark), run.result.data
    if published is None or data is None:
        return ""
    if data.train != published.train:
        return f"{_share(data.train / published.train)} of the data"
    if data.test != published.test:
        return f"{_share(data.test / published.test)} of the tests"
    return "all data"


def _share(share: float) -> str:
    """Return a share as the nearest simple fraction, or in per cent.

    >>> _share(116_323 / 697_932), _share(0.12), _share(0.66)
    ('1/6', '1/8', '66 %')
    """
    simple = Fraction(share).limit_denominator(LARGEST_DENOMINATOR)
    return str(simple) if simple.numerator == 1 < simple.denominator else f"{100 * share:.0f} %"
