"""Outputs that a network has in training, without training it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["batch_statistics"]


@contextmanager
def batch_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let batch-norm layers normalise by the statistics of the batch within the block, also in evaluation mode.

    Running averages remain as they are. They follow the training with a delay, so that outputs which training is to
    reproduce, such as the logits that memory stores, must not depend on them.

    >>> import torch
    >>> layer = nn.BatchNorm1d(1).eval()
    >>> with batch_statistics([layer]):
    ...     layer(torch.tensor([[1.0], [3.0]]))
    tensor([[-1.0000],
            [ 1.0000]], grad_fn=<NativeBatchNormBackward0>)
    >>> layer.running_mean
    tensor([0.])
    """
    layers = [part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)]
    averages = [(layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, (mean, variance) in zip(layers, averages, strict=True):
            layer.running_mean, layer.running_var = mean, variance
