"""SORO, structured orthogonal regularisation optimisation: the paper's Algorithm 1, solved entirely in T×T."""

from dataclasses import dataclass
from typing import Literal, Self, TypedDict, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchjd.aggregation import GramianWeightedAggregator, Weighting
from torchjd.linalg import Matrix, PSDMatrix

from spcl.aggregation.gramians import gramian, host_gramian
from spcl.errors import SpclError

__all__ = ["RELEASED", "SORO", "SOROSettings", "SOROSolution", "SOROWeighting", "solve_soro"]

Scale = Literal["unit", "min"]
Stop = Literal["converged", "iterations", "stalled"]
Array = NDArray[np.float64]

MOST_HALVINGS = 80


class SOROSettings(TypedDict, total=False):
    """The settings of :func:`solve_soro`, where they and their defaults (the paper's, but for η) are explained."""

    sigma: float
    lambda_: float
    eta: float | None
    iterations: int
    tolerance: float
    momentum: float
    scale: Scale
    preference: Tensor | None


RELEASED: SOROSettings = {
    "sigma": 500.0,
    "lambda_": 10.0,
    "eta": 1e-5,
    "iterations": 100,
    "tolerance": 1e-5,
    "momentum": 0.9,
    "scale": "min",
}
"""The settings of the code that the paper's authors published, where they differ from the paper's."""


@dataclass(frozen=True)
class SOROSolution:
    """What :func:`solve_soro` found; Ĝ = G M is never formed.

    Attributes:
        weights: M W, one weight per task: the update is G (M W).
        adjusted: ĜᵀĜ, the Gramian after adjustment.
        d: the diagonal that ĜᵀĜ was drawn to, before ``scale``.
        objective: the objective (eq. 9) at the start and after every iteration.
        stop: "converged" when it fell by less than the tolerance, "iterations" when their number was used up, "stalled"
            when no step however short lowered it.
    """

    weights: Tensor
    adjusted: Tensor
    d: Tensor
    objective: tuple[float, ...]
    stop: Stop


def solve_soro(
    gramian: Tensor,
    *,
    sigma: float = 100.0,
    lambda_: float = 100.0,
    eta: float | None = None,
    iterations: int = 100,
    tolerance: float = 1e-3,
    momentum: float = 0.0,
    scale: Scale = "unit",
    preference: Tensor | None = None,
) -> SOROSolution:
    r"""Solve the paper's eq. 9 by its Algorithm 1, for the Gramian :math:`C = G^\top G` of the tasks' gradients.

    .. math::
        \min_{\hat G, d} \|G - \hat G\|_F^2
        + \sigma \|\hat G^\top \hat G - \mathrm{diag}(d)\|_F^2 + \lambda \|d - 1\|_2^2

    Starting at :math:`\hat G_0 = U V^\top = G C^{-1/2}`, every iterate is :math:`\hat G_k = U X_k = G M_k` with T×T
    matrices X and M, so the whole solve costs T×T work. A step that makes the objective rise by more than the tolerance
    is taken back, the step halved and the momentum dropped; where the published fixed-step descent never rises by more,
    this is the published descent. A single task has nothing to be orthogonal to: its gradient is left as it is.

    Args:
        gramian: C, T×T, symmetric and finite.
        sigma: σ, how strongly ĜᵀĜ is drawn to a diagonal matrix.
        lambda_: λ, how strongly that diagonal is drawn to 1.
        eta: η, the step; by default 1/(8σ+2), half of the largest that is stable at an orthonormal Ĝ.
        iterations: N, the most iterations.
        tolerance: stop when the objective falls by less than this.
        momentum: heavy-ball momentum of the descent.
        scale: "unit" leaves Ĝ as it is, "min" multiplies it by the smallest singular value of G, of those that
            are not zero but for rounding.
        preference: W, one number per task; by default all ones, as in the paper.

    >>> import torch
    >>> G = torch.tensor([[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64)   # two gradients, as columns, cosine 0.8
    >>> solution = solve_soro(G.T @ G)
    >>> solution.adjusted.round(decimals=3)                               # nearly orthonormal afterwards
    tensor([[0.9990, 0.0020],
            [0.0020, 0.9990]], dtype=torch.float64)
    >>> solution.weights.round(decimals=3)
    tensor([0.7460, 0.7460], dtype=torch.float64)
    >>> solution.stop
    'converged'
    """
    _check_settings(sigma, lambda_, eta, iterations, tolerance, momentum, scale)
    C = host_gramian(gramian)
    W = _checked_preference(preference, len(C))
    if len(C) == 1:
        return _plain_step(C, W)
    S, V = _right_singular(C)
    step = 1.0 / (8.0 * sigma + 2.0) if eta is None else eta
    with np.errstate(all="ignore"):
        X, A, d, history, stop = _descend(S[:, None] * V.T, V.T, sigma, lambda_, step, iterations, tolerance, momentum)
    factor = S.min() if scale == "min" and len(S) else 1.0
    return SOROSolution(
        weights=torch.from_numpy(V @ (X @ W * factor / S)),
        adjusted=torch.from_numpy(factor**2 * A),
        d=torch.from_numpy(d),
        objective=tuple(history),
        stop=stop,
    )


def _plain_step(C: Array, W: Array) -> SOROSolution:
    return SOROSolution(torch.tensor(W), torch.tensor(C), torch.tensor(C[0]), (0.0,), "converged")


def _right_singular(C: Array) -> tuple[Array, Array]:
    """The singular values of G that are not zero, and their right singular vectors as columns."""
    eigenvalues, V = np.linalg.eigh(C)
    least, most = eigenvalues.min(initial=0.0), eigenvalues.max(initial=0.0)
    if least < -1e-3 * most:
        raise SpclError(f"a Gramian has no negative eigenvalue, but {least} was found")
    kept = eigenvalues > most * len(C) * np.finfo(np.float64).eps
    return np.sqrt(eigenvalues[kept]), V[:, kept]


def _descend(
    target: Array,
    X: Array,
    sigma: float,
    lambda_: float,
    step: float,
    iterations: int,
    tolerance: float,
    momentum: float,
) -> tuple[Array, Array, Array, list[float], Stop]:
    """Algorithm 1 on X = UᵀĜ, from UᵀUVᵀ = Vᵀ; the target is UᵀG. In these coordinates no κ enters the arithmetic.

    With a = diag(A), the best d is 1 + τ(a − 1), τ = σ/(λ+σ), so that the two penalties on the diagonal come to
    λτ‖a − 1‖² together.
    """
    tau = sigma / (lambda_ + sigma)

    def evaluated(X: Array, on_diagonal: float) -> tuple[Array, Array, float]:
        A = X.T @ X
        a = A.diagonal()
        misfit, flat, error = (X - target).ravel(), A.ravel(), a - 1.0
        penalty = sigma * (flat.dot(flat) - a.dot(a)) + on_diagonal * error.dot(error)
        return A, error, float(misfit.dot(misfit) + penalty)

    A, error, objective = evaluated(X, sigma)
    d, history, velocity, halvings = np.ones(X.shape[1]), [objective], np.zeros_like(X), 0
    while len(history) <= iterations:
        slope = 2.0 * (X - target) + (4.0 * sigma) * (X @ A - X * d)
        velocity = momentum * velocity + slope
        candidate = X - step * velocity
        result = evaluated(candidate, lambda_ * tau)
        while not result[-1] <= history[-1] + tolerance:
            if halvings == MOST_HALVINGS:
                return X, A, d, history, "stalled"
            halvings, step, velocity = halvings + 1, step / 2.0, slope
            candidate = X - step * velocity
            result = evaluated(candidate, lambda_ * tau)
        X, (A, error, objective) = candidate, result
        d = 1.0 + tau * error
        history.append(objective)
        if history[-2] - objective < tolerance:
            return X, A, d, history, "converged"
    return X, A, d, history, "iterations"


def _check_settings(
    sigma: float = 1.0,
    lambda_: float = 0.0,
    eta: float | None = None,
    iterations: int = 0,
    tolerance: float = 0.0,
    momentum: float = 0.0,
    scale: str = "unit",
    preference: Tensor | None = None,
) -> None:
    if preference is not None and preference.ndim != 1:
        raise SpclError(f"preference must be a vector, but its shape is {tuple(preference.shape)}")
    if not 0.0 < sigma < np.inf:
        raise SpclError(f"sigma must be positive, but it is {sigma}")
    if not 0.0 <= lambda_ < np.inf:
        raise SpclError(f"lambda_ must not be negative, but it is {lambda_}")
    if eta is not None and not 0.0 < eta < np.inf:
        raise SpclError(f"eta must be positive, but it is {eta}")
    if iterations < 0:
        raise SpclError(f"iterations must not be negative, but it is {iterations}")
    if not 0.0 <= tolerance < np.inf:
        raise SpclError(f"tolerance must not be negative, but it is {tolerance}")
    if not 0.0 <= momentum < 1.0:
        raise SpclError(f"momentum must be in [0, 1), but it is {momentum}")
    if scale not in ("unit", "min"):
        raise SpclError(f"scale must be 'unit' or 'min', but it is {scale!r}")


def _checked_preference(preference: Tensor | None, tasks: int) -> Array:
    if preference is None:
        return np.ones(tasks)
    if preference.shape != (tasks,):
        raise SpclError(
            f"preference needs one number for each of {tasks} tasks, but its shape is {tuple(preference.shape)}"
        )
    array: Array = preference.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(array).all():
        raise SpclError(f"preference must be finite, but it is {array.tolist()}")
    return array


class SOROWeighting(Weighting[PSDMatrix]):
    """TorchJD weighting of :class:`SORO`: Gramian in, weights out, by :func:`solve_soro`, whose settings it takes.

    >>> import torch
    >>> SOROWeighting(sigma=50.0)(torch.tensor([[1.0, -0.5], [-0.5, 4.0]]))
    tensor([1.1154, 0.5986])
    """

    def __init__(self, **settings: Unpack[SOROSettings]) -> None:
        super().__init__()
        _check_settings(**settings)
        self.settings = settings

    @classmethod
    def paper(cls, **changes: Unpack[SOROSettings]) -> Self:
        """The settings of the paper (§4.3 and appendix, "Hyperparameter selection"), and our η: the defaults."""
        return cls(**changes)

    @classmethod
    def released(cls, **changes: Unpack[SOROSettings]) -> Self:
        """The settings of the code that the paper's authors published.

        >>> SOROWeighting.released(iterations=10).settings["sigma"]
        500.0
        """
        return cls(**(RELEASED | changes))

    def solve(self, gramian: Tensor) -> SOROSolution:
        """The whole solution for this Gramian, of which :meth:`forward` gives the weights."""
        return solve_soro(gramian, **self.settings)

    def forward(self, gramian: PSDMatrix, /) -> Tensor:
        """The weights, in the Gramian's type and on its device."""
        return self.solve(gramian).weights.to(gramian)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in self.settings.items())})"


def _shown(value: object) -> str:
    """As ``repr``, but a tensor to its last digit."""
    return f"torch.tensor({value.tolist()}, dtype={value.dtype})" if isinstance(value, Tensor) else repr(value)


def _jacobian_gramian(jacobian: Matrix) -> PSDMatrix:
    return cast(PSDMatrix, gramian(jacobian))


class SORO(GramianWeightedAggregator):
    """TorchJD aggregator: the T rows of a Jacobian, orthogonalised by SORO and added up (Algorithm 2, lines 9 and 10).

    Takes the settings of :func:`solve_soro`; :meth:`paper` and :meth:`released` are the two published choices.

    >>> import torch
    >>> SORO(sigma=50.0)(torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]]))
    tensor([0.2315, 1.0008, 1.0008])
    """

    gramian_weighting: SOROWeighting

    def __init__(self, **settings: Unpack[SOROSettings]) -> None:
        weighting = SOROWeighting(**settings)
        super().__init__(weighting)
        self.weighting = weighting << _jacobian_gramian

    @classmethod
    def paper(cls, **changes: Unpack[SOROSettings]) -> Self:
        """The settings of the paper, and our η: the defaults."""
        return cls(**changes)

    @classmethod
    def released(cls, **changes: Unpack[SOROSettings]) -> Self:
        """The settings of the code that the paper's authors published."""
        return cls(**(RELEASED | changes))

    @staticmethod
    def _combine(matrix: Matrix, weights: Tensor) -> Tensor:
        precision = torch.promote_types(matrix.dtype, torch.float32)  # half of either kind is too coarse for the sum
        return (weights.to(precision) @ matrix.to(precision)).to(matrix.dtype)

    def __repr__(self) -> str:
        return repr(self.gramian_weighting).replace("SOROWeighting", type(self).__name__)
