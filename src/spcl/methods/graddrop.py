"""GradDrop, gradient sign dropout."""

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from spcl._util.validation import check_content
from spcl.methods.base import Method
from spcl.methods.settings import MethodSettings

CHUNK = 1 << 18


class GradDropSettings(MethodSettings):
    """Settings of :class:`GradDrop`; the defaults are the publication's (Algorithm 1)."""

    leak: float = Field(0.0, ge=0.0, le=1.0, description="ℓ, share of every gradient that passes whatever its sign")
    seed: int = Field(0, ge=0, description="seed of the random signs")


class GradDrop(Method):
    r"""Gradient sign dropout: every parameter follows either the tasks that raise it or the tasks that lower it.

    .. math:: u = \ell (g^+ + g^-) + (1-\ell) \begin{cases} g^+ & \text{with probability } P \\
        g^- & \text{else} \end{cases}, \qquad P = \frac12 \left(1 + \frac{\sum_i g_i}{\sum_i |g_i|}\right)

    with the sums :math:`g^\pm` of a parameter's positive and negative gradients. The expected update is the sum of the
    gradients. GradDrop is no weighting: it works on the gradients in place, in chunks. The random numbers of a step
    depend on the seed and the number of steps before, so they are the same after a checkpoint (on the same kind of
    device).

    Chen et al., *Just Pick a Sign: Optimizing Deep Multitask Models with Gradient Sign Dropout*, NeurIPS 2020,
    Algorithm 1.

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

    def combine(self, gradients: Tensor) -> Tensor:
        """Return the update, which overwrites the first row."""
        seed = np.random.SeedSequence((self.settings.seed, self._steps)).generate_state(1)
        generator = torch.Generator(gradients.device).manual_seed(int(seed[0]))
        self._steps += 1
        for chunk in gradients.split(CHUNK, dim=1):  # type: ignore[no-untyped-call]
            chunk[0].copy_(self._choose(chunk, generator))
        return gradients[0]

    def _choose(self, chunk: Tensor, generator: torch.Generator) -> Tensor:
        positive, negative = chunk.clamp(min=0.0).sum(dim=0), chunk.clamp(max=0.0).sum(dim=0)
        uniform = torch.rand(positive.shape, dtype=chunk.dtype, device=chunk.device, generator=generator)
        chosen = torch.where(uniform * (positive - negative) < positive, positive, negative)
        return torch.lerp(chosen, positive + negative, self.settings.leak)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        check_content(f"method {self.name!r}", state, {"steps": int})
        self._steps = state["steps"]
