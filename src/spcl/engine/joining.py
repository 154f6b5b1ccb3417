"""Which batches of a step can share a pass."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from spcl.batches import Inputs
from spcl.engine.known_layers import consists_of_known_layers
from spcl.engine.model import Samples, SharedModel
from spcl.engine.snapshot import BufferSnapshot
from spcl.engine.trial import Joining, Trial

__all__ = ["JoiningRule"]


MOST_IMAGES = 8
"""The mean size of a batch up to which convolutions on a CPU gain from a joint batch (benchmarks/sources.py)."""


class JoiningRule:
    """Decides, from the network's layers or a :class:`Trial` on the first samples of a kind, what one pass may cover.

    The decision depends on nothing that happened in training, so that a run that is resumed goes on the same way.

    Args:
        model: the shared model.
        parameters: of its backbone that are trained.
        snapshot: of its buffers.
        for_speed: whether batches that are faster one by one need a pass of their own.

    Attributes:
        names: the names of the trained parameters of the backbone.
        counters: batch-norm's numbers of batches.
        is_known: whether all layers of the backbone are known.
        reason: why the latest batches cannot all share a pass; None if they can.
    """

    def __init__(
        self,
        model: SharedModel,
        parameters: Sequence[nn.Parameter],
        snapshot: BufferSnapshot,
        for_speed: bool = True,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._snapshot = snapshot
        self.names = {each: name for name, each in model.backbone.named_parameters() if each.requires_grad}
        self._norms = [layer for layer in model.backbone.modules() if isinstance(layer, _NormBase)]
        counters = (layer.num_batches_tracked for layer in self._norms)
        self.counters: list[Tensor] = [counter for counter in counters if counter is not None]
        self._network_obstacle = _network_obstacle(model)
        self.is_known = consists_of_known_layers(model.backbone)
        has_images = any(isinstance(layer, nn.Conv2d | nn.Conv3d) for layer in model.backbone.modules())
        is_limited = for_speed and has_images and model.device.type == "cpu"
        self._most_samples = MOST_IMAGES if is_limited else None
        self._tried: dict[Hashable, tuple[Joining | None, str | None]] = {}
        self.reason: str | None = None

    def refuse(self, reason: str) -> None:
        """Let every batch have a pass of its own from now on."""
        self._network_obstacle = reason

    @property
    def has_batch_norm(self) -> bool:
        """Whether any layer takes statistics of a batch now."""
        return any(layer.training for layer in self._norms)

    def decide(self, groups: Sequence[Sequence[Samples]]) -> Joining | None:
        """Return what a pass over these batches may cover; None: each of them needs a pass of its own."""
        self.reason = self._network_obstacle or self._present_obstacle() or self._size_obstacle(groups)
        if self.reason is not None:
            return None
        if self.is_known:
            return "segments"
        kinds: dict[Hashable, list[Inputs]] = {}
        for samples in groups:
            for kind, x in {group.kind: group.x for group in samples}.items():
                kinds.setdefault(kind, []).append(x)
        results = [self._result(kind, inputs) for kind, inputs in kinds.items()]
        self.reason = next((reason for _, reason in results if reason is not None), None)
        joinings = {joining for joining, _ in results}
        return None if None in joinings else "rows" if "rows" in joinings else "segments"

    def _present_obstacle(self) -> str | None:
        if any(layer.training and layer.momentum is None for layer in self._norms):
            return "batch-norm with momentum=None averages over all batches"
        if self._model.has_joint_logits and any(_has_batch_norm(task.head) for task in self._model.classifiers):
            return "heads with batch-norm get the samples of all tasks"
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self.names):
            return "parameters of the backbone have hooks"
        return None

    def _size_obstacle(self, groups: Sequence[Sequence[Samples]]) -> str | None:
        """Return why these batches are faster one by one: many images fill the processor's caches anyway."""
        if self._most_samples is None:
            return None
        samples = sum([group.y.shape[0] for batch in groups for group in batch])
        if samples > self._most_samples * len(groups):
            return f"batches of more than {self._most_samples} images are faster one by one through convolutions"
        return None

    def _result(self, kind: Hashable, inputs: Sequence[Inputs]) -> tuple[Joining | None, str | None]:
        if kind not in self._tried:
            trial = Trial(self._model.backbone, self._parameters, self.names, self.counters, self._snapshot)
            try:
                result = trial.run([self._model.on_device(x) for x in inputs[:2]])
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
                return None, f"a pass over one batch raises {type(error).__name__}: {error}"
            if result == (None, None):
                return None, "the features or gradients of these samples are not finite"
            self._tried[kind] = result
        return self._tried[kind]


def _network_obstacle(model: SharedModel) -> str | None:
    """Return what, whatever the samples, prevents one pass over several batches."""
    modules = list(model.backbone.modules())
    if model.autocast is not None and model.device.type != "cuda":
        return "passes are in mixed precision"
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return "the backbone is compiled"
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        return "the backbone is a TorchScript module"
    return None


def _has_batch_norm(head: nn.Module | None) -> bool:
    if head is None or type(head) is nn.Linear:  # as most heads, which would be searched in every step
        return False
    return any(isinstance(layer, _NormBase) for layer in head.modules())
