"""The layers of a module to which the penalty applies, and their kernels."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, nn

from spcl.errors import SpclError, did_you_mean

LayerChoice = Callable[[str, nn.Module], bool] | Iterable[str] | None
"""The chosen layers: all convolutions and linear layers (`None`), a predicate `choice(name, layer)`, or names."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer: its weight, groups, and the distance of neighbouring outputs in taps.

    A transposed convolution is described by its adjoint, the convolution with the same `weight`.
    """

    name: str
    weight: Tensor
    groups: int
    stride: tuple[int, ...]

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """The shape of the kernel, by group: (groups, N, C, taps…), with -1 for N."""
        return self.groups, -1, *self.weight.shape[1:]

    @property
    def kernel(self) -> Tensor:
        """The weight in this shape, in float32 or float64."""
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)).view(self.kernel_shape)


def find_layers(module: nn.Module, choice: LayerChoice = None) -> list[Layer]:
    """Return the chosen convolutions and linear layers of `module`, in the order of `named_modules`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> [(layer.name, layer.stride) for layer in find_layers(net)]
    [('0', (2, 2)), ('3', ())]
    """
    eligible = {name: m for name, m in module.named_modules() if isinstance(m, (*CONVOLUTIONS, nn.Linear))}
    if choice is None:
        chosen = set(eligible)
    elif callable(choice):
        chosen = {name for name, m in eligible.items() if choice(name, m)}
    else:
        chosen = {choice} if isinstance(choice, str) else set(choice)
    for name in chosen - set(eligible):
        raise SpclError(f"no convolution or linear layer is named {name!r}; {did_you_mean(name, eligible)}")
    if not chosen:
        raise SpclError(
            f"none of the {len(eligible)} convolutions and linear layers is chosen; choose at least one layer"
        )
    return [_layer(name, m) for name, m in eligible.items() if name in chosen]


def is_convolution(name: str, layer: nn.Module) -> bool:
    """Return whether a layer is a convolution; as a choice of layers, the paper's, which penalises only convolutions.

    >>> [layer.name for layer in find_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 2)), is_convolution)]
    ['0']
    """
    return isinstance(layer, CONVOLUTIONS)


def _layer(name: str, module: nn.Module) -> Layer:
    weight: Tensor = module.weight  # type: ignore[assignment]
    if not isinstance(module, CONVOLUTIONS):
        return Layer(name, weight, groups=1, stride=())
    # outputs are `s` inputs apart and taps `d`: two shifted copies of a kernel share taps only at multiples of both
    stride = tuple(s // gcd(s, d) for s, d in zip(module.stride, module.dilation, strict=True))
    return Layer(name, weight, module.groups, stride)
