"""Batch-norm layers that take statistics over the ranks that split a batch."""

from collections.abc import Iterable

from torch import nn

from spcl.distributed.world import Group

__all__ = ["synchronise_batch_norm"]


def synchronise_batch_norm(modules: Iterable[nn.Module], group: Group) -> bool:
    """Let every ``nn.SyncBatchNorm`` take statistics over a group, not over ranks with other tasks; return if any is.

    PyTorch's layer runs on GPUs only.
    """
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    for layer in layers:
        layer.process_group = group.group
    return bool(layers)
