"""Paired significance tests between methods."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SIGNIFICANT", "configuration_p_value", "holm", "paired_p_value", "pairs_needed"]

SIGNIFICANT = 0.05
"""The level of significance."""

DECIMALS = 9
"""Differences that agree to this many decimals are equal but for rounding."""


def paired_p_value(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test on the values that share a key, None if none do.

    The keys are configuration and seed: two runs that share them train on the same tasks at the same times in the same
    order, so their difference is free of the variation between configurations, by far the largest. Ranks rather than a
    t-test, because differences of accuracies are neither normal nor of equal variance over configurations.

    >>> a = {seed: 80.0 + seed for seed in range(8)}
    >>> paired_p_value(a, {seed: value - 1.0 - 0.1 * seed for seed, value in a.items()})
    0.0078125
    """
    common = ours.keys() & theirs.keys()
    if not common:
        return None
    return _signed_rank_p_value(np.round([ours[key] - theirs[key] for key in common], DECIMALS))


def configuration_p_value(
    ours: Mapping[tuple[int, int], float], theirs: Mapping[tuple[int, int], float]
) -> float | None:
    """Return the p-value of the same test on the means of the configurations, None if none has several seeds.

    Runs of one configuration share tasks and timeline, so that their differences are not independent: the test on all
    pairs overstates the evidence. This one has a pair for each configuration, and may miss what there is: of the nine
    of the paper's protocols, no p-value is below 2/2⁹ = 0.004, of five none below 0.06.

    >>> a = {(config, seed): 80.0 + config + seed for config in range(5) for seed in range(3)}
    >>> configuration_p_value(a, {key: value - 1.0 - 0.1 * key[0] for key, value in a.items()})
    0.0625
    """
    common = ours.keys() & theirs.keys()
    configs = {config for config, _ in common}
    if len(common) == len(configs):
        return None
    means = [
        {config: float(np.mean([values[key] for key in common if key[0] == config])) for config in configs}
        for values in (ours, theirs)
    ]
    return paired_p_value(*means)


def pairs_needed(comparisons: int) -> int:
    """Return the number of pairs from which on a corrected p-value can be significant.

    The smallest p-value of n pairs, whose differences all have one sign, is 2 / 2ⁿ; Holm's method multiplies it by the
    number of comparisons.

    >>> pairs_needed(1), pairs_needed(14)
    (6, 10)
    """
    pairs = 1
    while comparisons * 2.0 ** (1 - pairs) >= SIGNIFICANT:
        pairs += 1
    return pairs


def _signed_rank_p_value(differences: NDArray[np.float64]) -> float:
    """Return the exact p-value where all signs are equally likely; differences of zero do not count.

    SciPy's own test is exact only where no two differences are equal.

    >>> _signed_rank_p_value(np.array([1.0, 1.0, 1.0, 2.0, 0.0]))
    0.125
    """
    from scipy.stats import rankdata  # slow to import

    differences = differences[differences != 0.0]
    ranks = np.rint(2.0 * rankdata(np.abs(differences))).astype(int)  # doubled, because equal ones share half ranks
    chances = np.ones(1)  # the probability of every sum of the ranks of positive differences
    for rank in ranks:
        without, plus = np.pad(chances, (0, rank)), np.pad(chances, (rank, 0))
        chances = (without + plus) / 2.0
    found = ranks[differences > 0.0].sum()
    return min(1.0, 2.0 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down method, in their order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    count = len(p_values)
    corrected = [0.0] * count
    highest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        highest = max(highest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = highest
    return corrected
