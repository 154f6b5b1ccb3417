"""SORO, structured orthogonal regularisation optimisation: its settings and the paper's Algorithm 1 in T×T matrices."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from spcl.aggregation.gramians import eigenvectors, host_gramian
from spcl.errors import SpclError

Array = NDArray[np.float64]
Stop = Literal["converged", "iterations", "stalled"]

MAX_HALVINGS = 80

RELEASED = {"sigma": 500.0, "lambda_": 10.0, "eta": 1e-5, "tolerance": 1e-5, "momentum": 0.9, "cutoff": 1e-7}


class SOROPresets:
    """Constructors with the two published sets of settings, for every class with SORO's settings."""

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """Return the paper's algorithm to the letter: Ĝ is not scaled, so a single task gives g/‖g‖."""
        return cls(**({"scale": "unit"} | changes))

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """Return the algorithm with the settings in the code published by the paper's authors."""
        return cls(**(RELEASED | changes))


class SOROSettings(SOROPresets, BaseModel):
    """Settings of SORO (Algorithm 1).

    σ, λ and the tolerance have the paper's values. The paper gives neither a step size η nor a scale of the result: the
    default η is half of the largest step size that is stable at an orthonormal Ĝ, the default scale is taken from the
    authors' code.

    >>> SOROSettings(sigma=50.0).lambda_
    100.0
    >>> SOROSettings.released(iterations=10).tolerance
    1e-05
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sigma: float = Field(100.0, gt=0.0, description="σ, weight of the distance of ĜᵀĜ from a diagonal matrix")
    lambda_: float = Field(100.0, ge=0.0, description="λ, weight of the distance of that diagonal from 1")
    eta: float | None = Field(None, gt=0.0, description="η, step size of the descent; 1/(8σ+2) if not given")
    iterations: int = Field(100, ge=0, description="N, maximum number of iterations")
    tolerance: float = Field(1e-3, ge=0.0, description="stop when the objective falls by less than this")
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="heavy-ball momentum of the descent")
    scale: Literal["unit", "min"] = Field(
        "min", description="multiply Ĝ by 1 (unit) or by the smallest non-zero singular value of G (min)"
    )
    cutoff: float = Field(
        2.0**-52, gt=0.0, lt=1.0, description="eigenvalues of GᵀG up to this times T times the largest count as zero"
    )


DEFAULT = SOROSettings()


@dataclass(frozen=True)
class SOROSolution:
    """Result of :func:`solve_soro`; Ĝ = G M itself is never formed.

    Attributes:
        weights: M W, one weight per task: the update is G (M W).
        adjusted: ĜᵀĜ, the Gramian of the adjusted gradients.
        d: the diagonal of eq. 9, before ``scale``.
        objective: the objective (eq. 9) at the start and after every iteration.
        stop: ``"converged"`` if it fell by less than the tolerance, ``"iterations"`` if their maximum was reached,
            ``"stalled"`` if no step size lowered it.
    """

    weights: Tensor
    adjusted: Tensor
    d: Tensor
    objective: tuple[float, ...]
    stop: Stop


def solve_soro(gramian: Tensor, settings: SOROSettings = DEFAULT, preference: Tensor | None = None) -> SOROSolution:
    r"""Solve the paper's eq. 9 by its Algorithm 1, for the Gramian :math:`C = G^\top G` of the tasks' gradients.

    .. math:: \min_{\hat G, d} \|G - \hat G\|_F^2
        + \sigma \|\hat G^\top \hat G - \mathrm{diag}(d)\|_F^2 + \lambda \|d - 1\|_2^2

    Starting at :math:`\hat G_0 = U V^\top = G C^{-1/2}`, every iterate is :math:`\hat G_k = U X_k = G M_k` with T×T
    matrices X and M, so the cost does not depend on the length of the gradients. A step that raises the objective by
    more than the tolerance is rejected and repeated with half the step size and no momentum; where the published
    descent never raises it, the results are equal. A single gradient has no other to be orthogonal to: Ĝ is g/‖g‖, or
    with ``scale="min"`` g itself.

    Args:
        gramian: C, T×T, symmetric and finite.
        settings: σ, λ and the settings of the descent.
        preference: W, one number per task; all ones by default, as in the paper.

    >>> G = torch.tensor([[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64)   # two gradients, as columns, cosine 0.8
    >>> solution = solve_soro(G.T @ G, SOROSettings.paper())
    >>> solution.adjusted.round(decimals=3)                               # nearly orthonormal
    tensor([[0.9990, 0.0020],
            [0.0020, 0.9990]], dtype=torch.float64)
    >>> solution.weights.round(decimals=3)
    tensor([0.7460, 0.7460], dtype=torch.float64)
    """
    C = host_gramian(gramian)
    W = checked_preference(preference, len(C))
    if len(C) == 1:
        return _solve_single(C, W, settings)
    S, V = right_singular(C, settings.cutoff)
    with np.errstate(all="ignore"):
        X, A, d, history, stop = _descend(S[:, None] * V.T, V.T, settings)
    factor = S[0] if settings.scale == "min" and len(S) else 1.0
    weights, adjusted = torch.from_numpy(V @ (X @ W * factor / S)), torch.from_numpy(factor**2 * A)
    return SOROSolution(weights, adjusted, torch.from_numpy(d), tuple(history), stop)


def _solve_single(C: Array, W: Array, settings: SOROSettings) -> SOROSolution:
    weights, adjusted = W, C
    if settings.scale == "unit" and C[0, 0] > 0.0:
        weights, adjusted = W / np.sqrt(C[0]), np.ones((1, 1))
    copies = [torch.from_numpy(each.copy()) for each in (weights, adjusted)]
    return SOROSolution(copies[0], copies[1], torch.from_numpy(np.ones(1)), (0.0,), "converged")


def right_singular(C: Array, cutoff: float) -> tuple[Array, Array]:
    """Return the non-zero singular values of G in ascending order, and their right singular vectors as columns."""
    eigenvalues, V = eigenvectors(C)
    least, most = (min(0.0, eigenvalues[0]), max(0.0, eigenvalues[-1])) if len(C) else (0.0, 0.0)
    if least < -1e-3 * most:
        raise SpclError(f"the Gramian must have no negative eigenvalue, but {least} was found")
    first = int(eigenvalues.searchsorted(most * len(C) * cutoff, side="right"))
    return np.sqrt(eigenvalues[first:]), V[:, first:]


def _descend(target: Array, X: Array, settings: SOROSettings) -> tuple[Array, Array, Array, list[float], Stop]:
    """Run Algorithm 1 on X = UᵀĜ, from X = Vᵀ towards UᵀG; in these coordinates G's condition number does not matter.

    With a = diag(A), the best d is 1 + τ(a − 1), where τ = σ/(λ+σ), so the two penalties on the diagonal add up to
    λτ‖a − 1‖².
    """
    sigma, tolerance = settings.sigma, settings.tolerance
    tau = sigma / (settings.lambda_ + sigma)
    step = 1.0 / (8.0 * sigma + 2.0) if settings.eta is None else settings.eta

    def evaluated(X: Array, on_diagonal: float = settings.lambda_ * tau) -> tuple[Array, Array, Array, float]:
        misfit, A = X - target, X.T @ X
        a, flat, distance = A.diagonal(), A.ravel(), misfit.ravel()
        error = a - 1.0
        penalty = sigma * (flat.dot(flat) - a.dot(a)) + on_diagonal * error.dot(error)
        return misfit, A, error, float(distance.dot(distance) + penalty)

    misfit, A, _, objective = evaluated(X, sigma)
    d, history, velocity, halvings = np.ones(X.shape[1]), [objective], np.zeros(X.shape), 0
    while len(history) <= settings.iterations:
        slope = 2.0 * misfit + (4.0 * sigma) * (X @ A - X * d)
        velocity = settings.momentum * velocity + slope if settings.momentum else slope
        candidate = X - step * velocity
        result = evaluated(candidate)
        while not result[-1] <= history[-1] + tolerance:
            if halvings == MAX_HALVINGS:
                return X, A, d, history, "stalled"
            halvings, step, velocity = halvings + 1, step / 2.0, slope
            candidate = X - step * velocity
            result = evaluated(candidate)
        X, (misfit, A, error, objective) = candidate, result
        d = 1.0 + tau * error
        history.append(objective)
        if history[-2] - objective < tolerance:
            return X, A, d, history, "converged"
    return X, A, d, history, "iterations"


def checked_preference(preference: Tensor | None, tasks: int) -> Array:
    """Return one finite number for each task; ones by default."""
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
