"""Preference W: how much memory counts against the current tasks."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from spcl._util.validation import check_content
from spcl.methods.base import MEMORY, Gradients, Method
from spcl.methods.settings import MethodSettings

FAST, SLOW = 0.9, 0.99
"""Decays of the two averages of a loss whose ratio is its slope: over about 10 and 100 steps."""


class PreferenceSettings(MethodSettings):
    """Settings of methods whose update is Ĝ W, with a preference W."""

    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["classes", "samples", "slopes"] | None = Field(
        None,
        description="memory's share of the preference W, between 0 and 1; tasks share the rest equally; classes, "
        "samples: in proportion to memory's classes, or to the samples seen of its tasks; slopes: the larger, the "
        "slower memory's loss falls compared with the tasks' losses; if not given, every gradient counts alike",
    )


class PreferenceMethod(Method):
    r"""A method whose update is Ĝ W, with a preference W: one number for each of the K gradients, with the sum K.

    .. math:: W_m = p K, \qquad W_i = \frac{(1 - p) K}{K - 1}, \qquad p = \frac{v_m}{v_m + \sum_i v_i}

    for memory with the share p and the K − 1 tasks. The setting ``memory_share`` is p, or says what v is:

    - ``"classes"``: the number of classes; for memory, of the tasks that it replays. A task without classes counts as
      one.
    - ``"samples"``: the number of samples seen so far; for memory, of the tasks that it replays. So a task counts by
      its samples before and after its end.
    - ``"slopes"``: :math:`v = A_{0.9}(\ell) / A_{0.99}(\ell)`, with the averages :math:`A_\beta \leftarrow \beta
      A_\beta + (1 - \beta)\, \ell` of the loss over the steps of the gradient; both begin with its first loss. It is 1
      for a loss that stays, less for one that falls and at most 10, whatever the size of the loss; it is 1 where an
      average is not positive.

    W is all ones if ``memory_share`` is None, without memory, and as long as no sample of the replayed tasks was
    counted, as after loading a checkpoint of other settings.

    >>> import numpy as np
    >>> from spcl.methods import SPCL
    >>> step = Gradients(("a", "b", "memory"), np.ones(3), None, classes=(2, 3, 15))
    >>> SPCL(memory_share=0.5).preference(step)
    tensor([0.7500, 0.7500, 1.5000], dtype=torch.float64)
    >>> SPCL(memory_share="classes").preference(step)
    tensor([0.3750, 0.3750, 2.2500], dtype=torch.float64)
    """

    settings: PreferenceSettings

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._samples: dict[str, int] = {}
        self._losses: dict[str, list[float]] = {}

    def preference(self, gradients: Gradients) -> Tensor | None:
        """Return W, or None for ones; call it once for every weighting, as samples are counted here."""
        share = self.settings.memory_share
        if share == "samples":
            self._count_samples(gradients)
        count = len(gradients.names)
        if share is None or MEMORY not in gradients.names or count == 1:
            return None
        place = gradients.names.index(MEMORY)
        if not isinstance(share, float):
            values = self._values(gradients)
            share = values[place] / sum(values) or 1.0 / count
        weights = torch.full((count,), (1.0 - share) * count / (count - 1), dtype=torch.float64)
        weights[place] = share * count
        return weights

    def _values(self, gradients: Gradients) -> Sequence[float]:
        """Return v of every gradient."""
        match self.settings.memory_share:
            case "samples":
                replayed = sum(self._samples.get(task, 0) for task in gradients.replayed)
                return [replayed if name == MEMORY else self._samples[name] for name in gradients.names]
            case "slopes":
                return [self._slope(name) for name in gradients.names]
            case _:
                return gradients.classes

    def _count_samples(self, gradients: Gradients) -> None:
        for name, samples in zip(gradients.names, gradients.samples, strict=True):
            if name != MEMORY:
                self._samples[name] = self._samples.get(name, 0) + samples

    def _slope(self, name: str) -> float:
        fast, slow = self._losses.get(name, (1.0, 1.0))
        return fast / slow if fast > 0.0 and slow > 0.0 else 1.0

    def after_step(self, losses: Mapping[str, float]) -> None:
        """Average the losses, where slopes are needed."""
        if self.settings.memory_share == "slopes":
            for name, loss in losses.items():
                fast, slow = self._losses.get(name, (loss, loss))
                self._losses[name] = [FAST * fast + (1.0 - FAST) * loss, SLOW * slow + (1.0 - SLOW) * loss]

    def state_dict(self) -> dict[str, Any]:
        """Return the samples seen of every task, or the averages of every loss."""
        averages = {name: list(pair) for name, pair in self._losses.items()}
        return {key: value for key, value in (("samples", dict(self._samples)), ("losses", averages)) if value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        kinds = {"samples": dict[str, int], "losses": dict[str, list[float]]}
        check_content(f"method {self.name!r}", state, {key: kind for key, kind in kinds.items() if key in state})
        self._samples = dict(state.get("samples", {}))
        self._losses = {name: list(pair) for name, pair in state.get("losses", {}).items()}
