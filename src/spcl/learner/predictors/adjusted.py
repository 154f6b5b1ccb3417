"""Logit adjustment by the frequencies of classes in recent steps."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.learner.predictors.base import PREDICTORS, ClassPredictor, StepSamples, StoredFeatures
from spcl.memory import Memory
from spcl.methods.tasks import Task

__all__ = ["AdjustedHead", "AdjustedLogits"]


class AdjustedHead(nn.Module):
    """A trained head with offsets of its logits."""

    def __init__(self, head: nn.Module, classes: int) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("offsets", torch.zeros(classes))

    offsets: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Return the adjusted logits."""
        logits: Tensor = self.head(features)
        return logits - self.offsets.to(logits.dtype)


@PREDICTORS.register("adjusted")
class AdjustedLogits(ClassPredictor):
    r"""The trained heads, less the logarithm of how frequent a class was in training lately.

    .. math:: \arg\max_c\, z_c(x) - \tau \log \pi_c

    The frequency :math:`\pi_c` is the share of a class among the samples of a step, new ones and those to be expected
    from memory, averaged over steps by :math:`\pi \leftarrow d\, \pi + (1 - d)\, \pi_{step}` with the decay d. So
    classes that were trained rarely of late are not predicted rarely for that. A method whose ``finished_weight`` is
    below 1 corrects that bias in training already; both together overcorrect.

    Menon et al., *Long-tail Learning via Logit Adjustment*, ICLR 2021, eq. 9.

    Args:
        strength: τ.
        decay: d.
    """

    def __init__(self, strength: float = 1.0, decay: float = 0.99) -> None:
        if strength < 0.0 or not 0.0 <= decay < 1.0:
            raise SpclError(
                f"strength is {strength} and decay {decay}; give a strength of at least 0 and a decay from 0 to below 1"
            )
        self.strength = strength
        self.decay = decay
        self._frequencies: dict[str, Tensor] = {}

    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module:
        """Return a copy of the trained head without offsets."""
        return AdjustedHead(copy.deepcopy(head), classes)

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Set the offsets, which are 0 for classes that were never trained."""
        known = {name: value for name, value in self._frequencies.items() if name in heads}
        total = sum(float(value.sum()) for value in known.values())
        for name, frequencies in known.items():
            head, shares = heads[name], frequencies / total
            assert isinstance(head, AdjustedHead)
            offsets = torch.where(shares > 0.0, self.strength * shares.log(), 0.0)
            head.offsets.copy_(offsets)

    def observe(self, samples: StepSamples, memory: Memory, memory_batch: int | None) -> None:
        """Average the frequencies of the classes in a step; of replayed samples, those to be expected."""
        counts = {task.name: _counts(task, y) for task, y in samples if task.classes is not None}
        stored = {name: buffer for name, buffer in memory.buffers.items() if memory.draws_from(buffer)}
        replayed = min(memory_batch or max(len(y) for _, y in samples), len(memory)) / max(len(memory), 1)
        for name, buffer in stored.items():
            if buffer.labelled:
                labels = torch.from_numpy(buffer.labels[: buffer.size])
                expected = replayed * torch.bincount(labels, minlength=buffer.classes).double()
                counts[name] = counts[name] + expected if name in counts else expected
        total = sum(float(count.sum()) for count in counts.values())
        for name in self._frequencies | counts:  # a set of names would have an order of its own in every process
            before, now = self._frequencies.get(name), counts.get(name)
            both = [] if before is None else [self.decay * before]
            both += [] if now is None else [(1.0 - self.decay) * now / total]
            self._frequencies[name] = torch.stack(both).sum(dim=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the frequencies by task."""
        return {"frequencies": dict(self._frequencies)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        self._frequencies = {name: value.cpu() for name, value in state["frequencies"].items()}


def _counts(task: Task, y: Tensor) -> Tensor:
    """Return how many samples every class of a task has in a batch; parts of them where targets are probabilities."""
    if y.is_floating_point():
        return y.double().sum(dim=0).cpu()
    return torch.bincount(y.cpu(), minlength=task.classes or 0).double()
