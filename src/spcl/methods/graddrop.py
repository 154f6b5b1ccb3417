"""Gradient sign dropout."""

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from spcl.methods.base import Method, MethodSettings

__all__ = ["GradDrop"]

CHUNK = 1 << 18


class GradDropSettings(MethodSettings):
    """Settings of :class:`GradDrop`; the defaults are the publication's (Algorithm 1)."""

    leak: float = Field(0.0, ge=0.0, le=1.0, description="ℓ, how much of every gradient passes whatever its sign")
    seed: int = Field(0, ge=0, description="of the random signs")


class GradDrop(Method):
    r"""Gradient sign dropout: every parameter follows either the tasks that raise it or those that lower it.

    With :math:`g^\pm` the sums of a parameter's positive and negative gradients, the positive side is chosen with
    probability :math:`P = g^+ / (g^+ - g^-) = \tfrac12 (1 + \sum_i g_i / \sum_i |g_i|)`:

    .. math:: u = \ell (g^+ + g^-) + (1-\ell) \begin{cases} g^+ & U < P \\ g^- & \text{else} \end{cases},
        \qquad U \sim \mathcal U(0, 1)

    In the mean that is the sum of the gradients. Chen et al., *Just Pick a Sign: Optimizing Deep Multitask Models with
    Gradient Sign Dropout*, NeurIPS 2020, Algorithm 1. The random numbers of a step depend on the seed and the number of
    steps before, so they are the same after a checkpoint (on the same kind of device).

    >>> GradDrop(leak=0.1)
    GradDrop(leak=0.1)
    """

    name = "graddrop"
    family = "MTL"
    order = 3
    summary = "every parameter follows the tasks of one sign, chosen at random by their weight"
    reference = "Chen et al., Just Pick a Sign: Gradient Sign Dropout, NeurIPS 2020"
    Settings = GradDropSettings
    settings: GradDropSettings

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._steps = 0

    def combine(self, rows: Tensor) -> Tensor:
        """Choose a sign for every parameter; the update is left in the first row."""
        seed = np.random.SeedSequence((self.settings.seed, self._steps)).generate_state(1)
        generator = torch.Generator(rows.device).manual_seed(int(seed[0]))
        self._steps += 1
        for chunk in rows.split(CHUNK, dim=1):  # type: ignore[no-untyped-call]
            chunk[0].copy_(self._choose(chunk, generator))
        return rows[0]

    def _choose(self, chunk: Tensor, generator: torch.Generator) -> Tensor:
        positive, negative = chunk.clamp(min=0.0).sum(dim=0), chunk.clamp(max=0.0).sum(dim=0)
        uniform = torch.rand(positive.shape, dtype=chunk.dtype, device=chunk.device, generator=generator)
        chosen = torch.where(uniform * (positive - negative) < positive, positive, negative)
        return torch.lerp(chosen, positive + negative, self.settings.leak)

    def state_dict(self) -> dict[str, Any]:
        """How many steps were taken."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps = state["steps"]
