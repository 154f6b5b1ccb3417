r"""A method that sees the losses after every update: FAMO, which needs neither a Gramian nor its own backward passes.

    python examples/own_method_famo.py

.. math:: u = c \sum_i \frac{z_i}{\ell_i} g_i, \qquad c = \Big(\sum_i \frac{z_i}{\ell_i}\Big)^{-1}, \qquad
    z = \mathrm{softmax}(\xi)

After the update, the logits ξ follow the change δ of the logarithms of the losses, so that the task whose loss falls
most slowly gets more weight:

.. math:: \xi_i \leftarrow \xi_i - \beta \Big(z_i \big(\delta_i - \sum_j z_j \delta_j\big)
    + \gamma \xi_i\Big), \qquad \delta_i = \log \ell_i(\theta_t) - \log \ell_i(\theta_{t+1})

Liu et al., *FAMO: Fast Adaptive Multitask Optimization*, NeurIPS 2023, Algorithm 1. Logits are kept by name, so tasks
may start, pause and end.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

import spcl
from spcl.methods import Gradients, Method, MethodSettings, Weights
from spcl.testing import check_method


class FAMOSettings(MethodSettings):
    rate: float = Field(0.025, gt=0.0, description="β, learning rate of the logits")
    decay: float = Field(0.001, ge=0.0, description="γ, decay of the logits")


class FAMO(Method):
    name = "famo"
    family = "MTL"
    summary = "more weight for tasks whose loss fell slowly in the last update"
    reference = "Liu et al., FAMO: Fast Adaptive Multitask Optimization, NeurIPS 2023"
    uses_gramian = False
    watches_updates = True
    Settings = FAMOSettings
    settings: FAMOSettings

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._logits: dict[str, float] = {}

    def weigh(self, gradients: Gradients) -> Weights:
        ratios = self._shares(gradients.names) / logarithms(gradients.losses.tolist()).exp()
        return Weights(ratios / ratios.sum())

    def after_update(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        shares = self._shares(list(before))
        falls = logarithms([*before.values()]) - logarithms([after[name] for name in before])
        slopes = shares * (falls - shares @ falls)
        for name, slope in zip(before, slopes.tolist(), strict=True):
            logit = self._logits.get(name, 0.0)
            self._logits[name] = logit - self.settings.rate * (slope + self.settings.decay * logit)

    def _shares(self, names: Sequence[str]) -> Tensor:
        return torch.tensor([self._logits.get(name, 0.0) for name in names], dtype=torch.float64).softmax(dim=0)

    def state_dict(self) -> dict[str, Any]:
        return {"logits": dict(self._logits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logits = dict(state["logits"])


def logarithms(losses: Sequence[float]) -> Tensor:
    """Return the logarithms of losses; losses that are zero, or infinite after an update, are clamped."""
    return torch.tensor(losses, dtype=torch.float64).nan_to_num(nan=1e8).clamp(1e-8, 1e8).log()


if __name__ == "__main__":
    check_method(FAMO, scaling=0)
    torch.manual_seed(0)
    learner = spcl.Learner(nn.Sequential(nn.Linear(2, 32), nn.ReLU()), FAMO(rate=0.1))
    learner.add_task("side", classes=2)
    learner.add_task("height", head=nn.Linear(32, 1), loss=nn.functional.mse_loss)
    for _ in range(200):
        x = torch.randn(32, 2)
        report = learner.step({"side": (x, (x[:, 0] > 0).long()), "height": (x, 100 * x[:, 1:])})
    print({name: f"{weight:.6f}" for name, weight in report.weights.items()})
