"""SORO, A-GEM and MaxDO as weightings and aggregators of TorchJD, the only module here that imports it."""

from typing import Any, cast

import torch
from torch import Tensor
from torchjd.aggregation import GramianWeightedAggregator, Weighting
from torchjd.linalg import Matrix, PSDMatrix

from spcl._util.validation import validated
from spcl.aggregation.agem import agem_weights
from spcl.aggregation.gramians import gramian
from spcl.aggregation.maxdo import maxdo_weights
from spcl.aggregation.soro import SOROPresets, SOROSettings, SOROSolution, solve_soro
from spcl.errors import SpclError


class AGEMWeighting(Weighting[PSDMatrix]):
    """TorchJD weighting of two gradients by :func:`agem_weights`.

    >>> AGEMWeighting()(torch.tensor([[5.0, -1.0], [-1.0, 2.0]]))
    tensor([1.0000, 0.5000])
    """

    def forward(self, gramian: PSDMatrix, /) -> Tensor:
        """Return the weights, in the Gramian's dtype and on its device."""
        return agem_weights(gramian)


class MaxDOWeighting(Weighting[PSDMatrix]):
    """TorchJD weighting by :func:`maxdo_weights`.

    >>> MaxDOWeighting()(torch.eye(2))
    tensor([0.5000, 0.5000])
    """

    def forward(self, gramian: PSDMatrix, /) -> Tensor:
        """Return the weights, in the Gramian's dtype and on its device."""
        return maxdo_weights(gramian)


class SOROWeighting(SOROPresets, Weighting[PSDMatrix]):
    """TorchJD weighting of :class:`SORO`: computes one weight per task from the Gramian, by :func:`solve_soro`.

    Args:
        preference: W, one number per task; all ones by default.
        settings: the fields of :class:`SOROSettings`.

    >>> SOROWeighting(sigma=50.0)(torch.tensor([[1.0, -0.5], [-0.5, 4.0]]))
    tensor([1.0692, 0.5738])
    """

    def __init__(self, *, preference: Tensor | None = None, **settings: Any) -> None:
        super().__init__()
        if preference is not None and preference.ndim != 1:
            raise SpclError(f"preference must be a vector, but its shape is {tuple(preference.shape)}")
        self.settings = validated(SOROSettings, settings, "SORO")
        self.preference = preference

    def solve(self, gramian: Tensor) -> SOROSolution:
        """Return the whole solution for this Gramian; :meth:`forward` returns its weights."""
        return solve_soro(gramian, self.settings, self.preference)

    def forward(self, gramian: PSDMatrix, /) -> Tensor:
        """Return the weights, in the Gramian's dtype and on its device."""
        return self.solve(gramian).weights.to(gramian)

    def __repr__(self) -> str:
        shown = {name: repr(value) for name, value in self.settings.model_dump(exclude_defaults=True).items()}
        if self.preference is not None:
            shown["preference"] = f"torch.tensor({self.preference.tolist()}, dtype={self.preference.dtype})"
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"


class SORO(SOROPresets, GramianWeightedAggregator):
    """TorchJD aggregator that orthogonalises the T rows of a Jacobian and adds them up (Algorithm 2, lines 9 and 10).

    Use it where TorchJD takes an aggregator: ``spcl.aggregation.SORO()``. A learner of this package takes the method
    :class:`spcl.methods.SORO`, which has the same settings and gives the same update.

    Takes the arguments of :class:`SOROWeighting`; :meth:`paper` and :meth:`released` have the two published settings.

    >>> SORO(sigma=50.0)(torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]]))
    tensor([0.4533, 1.9596, 1.9596])
    """

    gramian_weighting: SOROWeighting

    def __init__(self, *, preference: Tensor | None = None, **settings: Any) -> None:
        weighting = SOROWeighting(preference=preference, **settings)
        super().__init__(weighting)
        self.weighting = weighting << _jacobian_gramian

    @staticmethod
    def _combine(matrix: Matrix, weights: Tensor) -> Tensor:
        precision = torch.promote_types(matrix.dtype, torch.float32)  # float16 and bfloat16 are too coarse for the sum
        return (weights.to(precision) @ matrix.to(precision)).to(matrix.dtype)

    def __repr__(self) -> str:
        return repr(self.gramian_weighting).replace("SOROWeighting", type(self).__name__)


def _jacobian_gramian(jacobian: Matrix) -> PSDMatrix:
    return cast(PSDMatrix, gramian(jacobian))
