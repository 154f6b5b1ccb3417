"""DWA, dynamic weight average."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field

from spcl._util.validation import check_content
from spcl.methods.base import Gradients, Method, Weights
from spcl.methods.settings import MethodSettings


class DWASettings(MethodSettings):
    """Settings of :class:`DWA`; the default is the publication's."""

    temperature: float = Field(2.0, gt=0.0, description="τ, temperature: larger gives more even weights")


class DWA(Method):
    r"""Dynamic weight average: more weight for tasks whose loss falls slowly.

    .. math:: w_i = K\, \mathrm{softmax}_i\!\left(\frac{r_i}{\tau}\right), \qquad
        r_i = \frac{\ell_i(t-1)}{\ell_i(t-2)}

    over the K gradients of the step. The publication averages losses over epochs; here they are the losses of the last
    two steps in which the task took part. The ratio is 1 until two losses are known, and where the earlier one is not
    positive. Losses are kept by name, so tasks may start, pause and end.

    Liu et al., *End-to-End Multi-Task Learning with Attention*, CVPR 2019.

    >>> DWA(temperature=1.0)
    DWA(temperature=1.0)
    """

    name = "dwa"
    family = "MTL"
    order = 2
    summary = "more weight for tasks whose loss falls slowly"
    reference = "Liu et al., End-to-End Multi-Task Learning with Attention, CVPR 2019"
    reduction = "sum"
    uses_gramian = False
    Settings = DWASettings
    settings: DWASettings

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._losses: dict[str, list[float]] = {}

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights, from the losses of earlier steps."""
        ratios = torch.tensor([self._ratio(name) for name in gradients.names], dtype=torch.float64)
        ratios = ratios.clamp(max=torch.finfo(torch.float64).max) / self.settings.temperature
        return Weights(len(ratios) * ratios.softmax(dim=0))

    def _ratio(self, name: str) -> float:
        match self._losses.get(name):
            case [earlier, later] if earlier > 0.0:
                return later / earlier
            case _:
                return 1.0

    def after_step(self, losses: Mapping[str, float]) -> None:
        """Keep the last two losses of every gradient."""
        for name, loss in losses.items():
            self._losses[name] = [*self._losses.get(name, [])[-1:], loss]

    def state_dict(self) -> dict[str, Any]:
        """Return the last two losses of every gradient."""
        return {"losses": {name: list(losses) for name, losses in self._losses.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        check_content(f"method {self.name!r}", state, {"losses": dict[str, list[float]]})
        self._losses = {name: list(losses) for name, losses in state["losses"].items()}
