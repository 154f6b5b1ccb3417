"""EMGD, elastic multi-gradient descent."""

import math
from typing import Any

import torch
from pydantic import Field

from spcl._util.validation import check_content
from spcl.aggregation import emgd_weights
from spcl.errors import CheckpointError
from spcl.methods.base import Gradients, Method, Weights
from spcl.methods.settings import MethodSettings


class EMGDSettings(MethodSettings):
    """Settings of :class:`EMGD`; the defaults are the ones in its authors' code."""

    temperature: float = Field(5.0, gt=0.0, description="τ, temperature: larger gives more even factors σ")
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="μ, momentum of the running gradient norms")


class EMGD(Method):
    r"""Elastic multi-gradient descent: the shortest combination of gradients in which every task keeps a share.

    .. math:: \min_w w^\top C w \quad\text{subject to}\quad \sum_i \sigma_i w_i = 1,\ w_i \ge \tfrac{1}{T+1}, \qquad
        \sigma = \mathrm{softmax}(m / \tau)

    with the elastic factors σ of running gradient norms :math:`m_i \leftarrow \mu m_i + (1-\mu) \|g_i\|`, which start
    at the first norm and are kept by name. Unlike MGDA it depends on the scale of the gradients. The publication's
    editing of memory is not included.

    Lyu et al., *Elastic Multi-Gradient Descent for Parallel Continual Learning*, IEEE TPAMI
    (:func:`spcl.aggregation.emgd_weights`).

    >>> EMGD(temperature=1.0)
    EMGD(temperature=1.0)
    """

    name = "emgd"
    family = "PCL"
    order = 2
    summary = "the shortest combination of gradients in which every task keeps a share"
    reference = "Lyu et al., Elastic Multi-Gradient Descent for Parallel Continual Learning, IEEE TPAMI"
    Settings = EMGDSettings
    settings: EMGDSettings

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._norms: dict[str, float] = {}

    def weigh(self, gradients: Gradients) -> Weights:
        """Update the running norms and return the weights under their elastic factors."""
        gramian = gradients.known_gramian()
        for name, norm in zip(gradients.names, gramian.diagonal().sqrt().tolist(), strict=True):
            before = self._norms.get(name, norm)
            self._norms[name] = self.settings.momentum * before + (1.0 - self.settings.momentum) * norm
        running = torch.tensor([self._norms[name] for name in gradients.names], dtype=torch.float64)
        return Weights(emgd_weights(gramian, running, self.settings.temperature))

    def state_dict(self) -> dict[str, Any]:
        """Return the running norm of every gradient."""
        return {"norms": dict(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        check_content(f"method {self.name!r}", state, {"norms": dict[str, float]})
        if not all(map(math.isfinite, state["norms"].values())):
            raise CheckpointError(f"norms of method {self.name!r} is {state['norms']!r:.80}; use another checkpoint")
        self._norms = dict(state["norms"])
