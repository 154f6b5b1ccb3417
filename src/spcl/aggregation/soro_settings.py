"""Settings of SORO: one definition for the solver, the TorchJD classes and the method."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SOROPresets", "SOROSettings"]

RELEASED = {"sigma": 500.0, "lambda_": 10.0, "eta": 1e-5, "tolerance": 1e-5, "momentum": 0.9, "cutoff": 1e-7}


class SOROPresets:
    """Constructors with the two published sets of settings, for every class that is made from SORO's settings."""

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """Return the paper's algorithm to the letter: Ĝ is not scaled, so a single task gives g/‖g‖."""
        return cls(**({"scale": "unit"} | changes))

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """Return the algorithm with the settings of the code that the paper's authors published."""
        return cls(**(RELEASED | changes))


class SOROSettings(SOROPresets, BaseModel):
    """Settings of SORO (Algorithm 1).

    σ, λ and the tolerance are the paper's. The paper gives no step η and no scale of the result; the default η is half
    of the largest step that is stable at an orthonormal Ĝ, the default scale that of the code its authors published.

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
