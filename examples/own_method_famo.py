r"""FAMO, a method that sees the losses after every update: its weights follow how much each loss fell.

.. math:: u = c \sum_i \tfrac{z_i}{\ell_i} g_i, \qquad \xi_i \leftarrow \xi_i - \beta \Big(z_i \big(\delta_i
    - \sum_j z_j \delta_j\big) + \gamma \xi_i\Big), \qquad \delta_i = \log \ell_i(\theta_t) - \log \ell_i(\theta_{t+1})

with z = softmax(ξ), and c such that the weights add up to 1. Liu et al., *FAMO: Fast Adaptive Multitask Optimization*,
NeurIPS 2023. ``python -m spcl run --plugin examples/own_method_famo.py --method famo --out runs/famo`` trains with it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from spcl.methods import Gradients, Method, Weights

RATE, DECAY = 0.025, 0.001  # β and γ


class FAMO(Method):
    name = "famo"
    family = "MTL"
    summary = "more weight for tasks whose loss fell slowly in the last updates"
    reference = "Liu et al., FAMO: Fast Adaptive Multitask Optimization, NeurIPS 2023"
    uses_gramian = False
    watches_updates = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._xi: dict[str, float] = {}  # by name, because tasks come and go

    def weigh(self, gradients: Gradients) -> Weights:
        ratios = self._shares(gradients.names) / logarithms(gradients.losses).exp()
        return Weights(ratios / ratios.sum())

    def after_update(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        shares = self._shares(before)
        falls = logarithms(before.values()) - logarithms(after.values())
        for name, slope in zip(before, (shares * (falls - shares @ falls)).tolist(), strict=True):
            xi = self._xi.get(name, 0.0)
            self._xi[name] = xi - RATE * (slope + DECAY * xi)

    def _shares(self, names: Iterable[str]) -> Tensor:
        return torch.tensor([self._xi.get(name, 0.0) for name in names], dtype=torch.float64).softmax(dim=0)

    def state_dict(self) -> dict[str, Any]:
        return {"xi": dict(self._xi)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._xi = dict(state["xi"])


def logarithms(losses: Iterable[float]) -> Tensor:
    return torch.tensor([*losses], dtype=torch.float64).nan_to_num(nan=1e8).clamp(1e-8, 1e8).log()
