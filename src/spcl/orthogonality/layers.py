"""The layers of a module that the penalty applies to, and their kernels."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd

from torch import Tensor, nn

from spcl.errors import SpclError, did_you_mean

LayerChoice = Callable[[str, nn.Module], bool] | Iterable[str] | None
"""All convolutions and linear layers (`None`), those for which `choice(name, layer)` is true, or those named."""

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
    return [_as_layer(name, m) for name, m in eligible.items() if name in chosen]


def is_convolution(name: str, layer: nn.Module) -> bool:
    """Return whether a layer is a convolution, as a choice of layers: the paper penalises only those.

    >>> [layer.name for layer in find_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 2)), is_convolution)]
    ['0']
    """
    return isinstance(layer, CONVOLUTIONS)


def _as_layer(name: str, module: nn.Module) -> Layer:
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(module, CONVOLUTIONS):
        return Layer(name, weight, module.groups, _stride_in_taps(module.stride, module.dilation))
    return Layer(name, weight, groups=1, stride=())


def _stride_in_taps(stride: Iterable[int], dilation: Iterable[int]) -> tuple[int, ...]:
    # Outputs are `s` inputs apart and taps `d`: two shifted copies of a kernel share taps only at multiples of both.
    return tuple(s // gcd(s, d) for s, d in zip(stride, dilation, strict=True))
