"""One step of SGD for sources with encoders: a gradient per source by autograd, and G with zeros where none reaches."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from spcl.learner import Learner
from spcl.orthogonality import orthogonality_penalty

Combine = Callable[[Tensor, bool], Tensor]


class SourcesByHand:
    """Copies of a learner's networks before a step, and that step on them.

    Args:
        learner: the learner, which stays as it is.
        rate: the learning rate of SGD.
        replayed: the number of samples to replay.
    """

    def __init__(self, learner: Learner, rate: float, replayed: int) -> None:
        heads = {name: task.head for name, task in learner.tasks.items()}
        encoders = {name: source.encoder for name, source in learner.sources.items()}
        self.backbone, self.heads, self.encoders = copy.deepcopy((learner.model.backbone, heads, encoders))
        self.memory = copy.deepcopy(learner.memory)
        self.task_of = {name: source.task.name for name, source in learner.sources.items()}
        self.batch_of = {name: source.batch for name, source in learner.sources.items()}
        self.classes = {name: task.classes for name, task in learner.tasks.items()}
        self.is_joint = learner.scenario == "class"
        self.rate, self.replayed = rate, replayed

    def loss(self, source: str, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the losses of samples."""
        encoder, task = self.encoders[source], self.task_of[source]
        features = self.backbone(x if encoder is None else encoder(x))
        if self.classes[task] is None:
            return mse_loss(self.heads[task](features), y) * len(x)
        if not self.is_joint:
            return cross_entropy(self.heads[task](features), y, reduction="sum")
        classifiers = [name for name, classes in self.classes.items() if classes is not None]
        first = sum(self.classes[name] for name in classifiers[: classifiers.index(task)])
        logits = torch.cat([self.heads[name](features) for name in classifiers], dim=1)
        return cross_entropy(logits, y + first, reduction="sum")

    def losses(self, given: Mapping[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the loss of every source in the order of the sources, then memory's."""
        losses = [self.loss(name, *given[name]) / len(given[name][1]) for name in self.task_of if name in given]
        drawn = self.memory.draw(self.replayed) if self.memory is not None and len(self.memory) else []
        if drawn:
            parts = [self.loss(part.source, part.x, part.y) for part in drawn]
            losses.append(torch.stack(parts).sum() / sum(len(part.y) for part in drawn))
        return losses

    def step(self, given: Mapping[str, tuple[Tensor, Tensor]], combine: Combine, alpha: float = 0.0) -> None:
        """Make the step."""
        reached = {(self.batch_of[name], p) for name, each in self.encoders.items() if each for p in each.parameters()}
        counts = Counter(parameter for _, parameter in reached)
        reach = {p: counts[p] for each in self.encoders.values() if each for p in each.parameters()}
        shared = [*self.backbone.parameters(), *(p for p, sources in reach.items() if sources > 1)]
        heads = [p for head in self.heads.values() if head is not None for p in head.parameters()]
        own = [*heads, *(p for p, sources in reach.items() if sources == 1)]
        losses = self.losses(given)
        columns = [torch.autograd.grad(loss, [*shared, *own], allow_unused=True) for loss in losses]
        rows = torch.stack([self._flat(each[: len(shared)], shared) for each in columns])
        penalties = self._penalty_gradients([*shared, *own]) if alpha else {}
        rows = rows + alpha * self._flat([penalties.get(each) for each in shared], shared)
        update = combine(rows, len(losses) > len(given))
        with torch.no_grad():
            for parameter, change in zip(shared, update.split([each.numel() for each in shared]), strict=True):
                parameter -= self.rate * change.view_as(parameter)
            for place, parameter in enumerate(own, start=len(shared)):
                present = [each[place] for each in columns if each[place] is not None]
                if present and parameter in penalties:
                    present.append(alpha * penalties[parameter])
                for gradient in present:
                    parameter -= self.rate * gradient

    def _penalty_gradients(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return the gradients of the orthogonality penalty of backbone and encoders."""
        modules = [self.backbone, *dict.fromkeys(each for each in self.encoders.values() if each is not None)]
        layers = {m for module in modules for m in module.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)}
        penalty = torch.stack([orthogonality_penalty(layer) for layer in layers]).sum()
        found = torch.autograd.grad(penalty, parameters, allow_unused=True)
        return {each: gradient for each, gradient in zip(parameters, found, strict=True) if gradient is not None}

    @staticmethod
    def _flat(gradients: Any, like: list[nn.Parameter]) -> Tensor:
        pairs = zip(gradients, like, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])

    def assert_equals(self, learner: Learner, tolerance: float = 1e-9) -> None:
        """Raise unless the learner's networks equal these."""
        pairs = [("backbone", learner.model.backbone, self.backbone)]
        pairs += [(f"head of {name}", task.head, self.heads[name]) for name, task in learner.tasks.items()]
        pairs += [(f"encoder of {name}", each.encoder, self.encoders[name]) for name, each in learner.sources.items()]
        for what, found, expected in pairs:
            if expected is not None:
                for key, value in expected.state_dict().items():
                    here = found.state_dict()[key]
                    torch.testing.assert_close(
                        here, value, rtol=tolerance, atol=tolerance, msg=lambda text, w=what, k=key: f"{w} {k}: {text}"
                    )
