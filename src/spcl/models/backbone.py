"""What backbones share: the samples they are built for, their names, the conversion of bytes, and initial weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from spcl._util.registry import Registry
from spcl.errors import SpclError


@dataclass(frozen=True)
class InputSpec:
    """Shape and type of one sample, from which a backbone is built.

    Attributes:
        shape: of one sample without the dimension of the batch; of the first part where samples have several.
        dtype: ``torch.uint8`` for images as bytes, ``torch.int64`` for tokens, otherwise floating point. Bytes are
            normalised to floats before they reach the backbone.
        vocabulary: for tokens, one more than the largest in the training data.
        parts: the inputs of every part, by name or position, where samples are dicts or tuples of tensors.
        sources: the inputs of every source, in order, for a backbone of several sources; the other attributes describe
            the first source, except for the vocabulary, which is the largest of all.

    >>> InputSpec.of(torch.zeros(10, 3, 32, 32)).shape
    (3, 32, 32)
    >>> InputSpec.of({"input_ids": torch.tensor([[1, 9]]), "attention_mask": torch.tensor([[1, 0]])}).vocabulary
    10
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    vocabulary: int | None = None
    parts: Mapping[str, "InputSpec"] | None = None
    sources: tuple["InputSpec", ...] = ()

    @classmethod
    def of(cls, samples: Any) -> Self:
        """Describe a batch of samples: a tensor, or a dict or tuple of tensors."""
        if isinstance(samples, Tensor):
            is_tokens = not samples.is_floating_point() and samples.dtype != torch.uint8
            vocabulary = int(samples.max()) + 1 if is_tokens and samples.numel() else None
            return cls(tuple(samples.shape[1:]), samples.dtype, vocabulary)
        named = samples if isinstance(samples, Mapping) else {str(index): part for index, part in enumerate(samples)}
        parts = {name: InputSpec.of(part) for name, part in named.items()}
        first = next(iter(parts.values()))
        return cls(first.shape, first.dtype, first.vocabulary, parts)

    def __or__(self, other: "InputSpec") -> "InputSpec":
        """Return the inputs of a network for both kinds of samples: the first, with the larger of the two vocabularies.

        >>> texts, others = torch.tensor([[1, 9]]), torch.tensor([[3, 20]])
        >>> (InputSpec.of(texts) | InputSpec.of(others)).vocabulary
        21
        """
        parts = None if self.parts is None else dict(self.parts)
        if parts is not None and other.parts is not None:
            parts |= {name: parts[name] | part for name, part in other.parts.items() if name in parts}
        vocabulary = max(self.vocabulary or 0, other.vocabulary or 0) or None
        return replace(self, vocabulary=vocabulary, parts=parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the description as plain data."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "vocabulary": self.vocabulary,
            "parts": None if self.parts is None else {name: part.state_dict() for name, part in self.parts.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Restore from :meth:`state_dict`.

        >>> inputs = InputSpec.of(torch.zeros(1, 4))
        >>> InputSpec.from_state_dict(inputs.state_dict()) == inputs
        True
        """
        parts = state["parts"]
        return cls(
            tuple(state["shape"]),
            getattr(torch, state["dtype"]),
            state["vocabulary"],
            None if parts is None else {name: InputSpec.from_state_dict(part) for name, part in parts.items()},
        )

    def __str__(self) -> str:
        if self.parts is not None:
            return ", ".join(f"{name}: {part}" for name, part in self.parts.items())
        return f"{str(self.dtype).removeprefix('torch.')} {'×'.join(map(str, self.shape))}"


# -- backbones by name


BACKBONES: Registry[Callable[..., nn.Module]] = Registry(
    "backbone", nn.Module, positional=1, keywords=("batch_norm_momentum",)
)
"""Functions ``make(inputs, **options)`` of a network; ``inputs`` is an :class:`InputSpec`.

The network returns features of shape (batch, features), and has their number as the attribute ``feature_dim`` if it can
be known before the first batch.

>>> from spcl.models import BACKBONES
>>> BACKBONES.make({"name": "mlp", "hidden": [32, 16]}, InputSpec((28, 28), torch.float32)).feature_dim
16
"""


def image_shape(name: str, inputs: InputSpec) -> tuple[int, ...]:
    """Return channels, height and width of the samples, or raise an error if they are no images."""
    if len(inputs.shape) != 3 or inputs.parts is not None:
        raise SpclError(f"backbone {name!r} needs images, channels × height × width, but the samples are {inputs}")
    return inputs.shape


# -- parts around a network


class Backbone(nn.Sequential):
    """A sequence of modules with the `feature_dim` of the last one, or None if that has none.

    >>> from spcl.models import MLP, Normalise
    >>> Backbone(Normalise(mean=0.13, std=0.31), MLP(784)).feature_dim
    64
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.feature_dim: int | None = getattr(modules[-1], "feature_dim", None)


class Normalise(nn.Module):
    """Normalisation `(x / 255 - mean) / std` in float32, for bytes or floats from 0 to 255.

    Args:
        mean: Mean of the data scaled to 0 … 1: one number, or one per channel (dimension 1).
        std: Standard deviation of the data scaled to 0 … 1, likewise.

    >>> Normalise(mean=0.5, std=0.25)(torch.tensor([[0, 51, 255]], dtype=torch.uint8))
    tensor([[-2.0000, -1.2000,  2.0000]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).flatten())
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).flatten())
        if self.mean.shape != self.std.shape or not bool((self.std > 0).all()):
            raise SpclError(f"mean is {mean} and std {std}; give equally many of both, and every std positive")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch; dimension 1 holds the channels."""
        shape = (-1,) + (1,) * (x.dim() - 2)
        return (x.to(torch.float32) / 255 - self.mean.view(shape)) / self.std.view(shape)


class Standardise(nn.Module):
    """Standardisation `(x - mean) / std` of every feature, the last dimension of a sample.

    Mean and std are taken from the samples last given to :meth:`fit`, and are 0 and 1 before. They do not change in
    training, so that every engine computes the same, and a checkpoint keeps them. A run fits them to its training
    samples; in a loop or service of your own, fit them to the first batch.

    Args:
        features: Their number.

    >>> standardise = Standardise(2)
    >>> standardise.fit(torch.tensor([[1.0, 300.0], [3.0, 500.0], [5.0, 700.0]]))
    >>> standardise(torch.tensor([[5.0, 500.0]]))
    tensor([[1., 0.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    def fit(self, x: Tensor) -> None:
        """Take mean and std from a batch; the std of a constant feature becomes 1."""
        values = x.detach().to(self.mean.device, torch.float64).flatten(0, -2)
        if len(values) < 2 or values.shape[1] != len(self.mean):
            raise SpclError(
                f"cannot standardise {len(self.mean)} features by {len(values)} of {values.shape[-1]} features; give "
                f"at least two samples of the network's inputs"
            )
        std, mean = torch.std_mean(values, dim=0)
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6 * mean.abs().clamp(min=1e-6), std, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise a batch."""
        return (x - self.mean) / self.std


def standardised(inputs: InputSpec, network: nn.Module) -> nn.Module:
    """Put a module before a network that standardises its inputs."""
    return Backbone(Standardise(inputs.shape[-1]), network)


# -- initial weights


Initialisation = Literal["he", "glorot"]


def initialise(module: nn.Module, how: Initialisation) -> None:
    """Initialise a module by He's or by Glorot's rule."""
    (initialise_glorot if how == "glorot" else initialise_he)(module)


def initialise_he(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers from N(0, 2 / fan-in) and zero the biases (He et al., 2015).

    >>> layer = nn.Linear(10_000, 100)
    >>> initialise_he(layer)
    >>> round(layer.weight.std().item() * 5_000**0.5, 1), layer.bias.abs().max().item()
    (1.0, 0.0)
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def initialise_glorot(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers from ±√(6 / (fan-in + fan-out)) and zero the biases.

    Glorot and Bengio, 2010; the default of TensorFlow, in which the paper's networks were published.

    >>> layer = nn.Linear(500, 100)
    >>> initialise_glorot(layer)
    >>> round(layer.weight.abs().max().item(), 2), layer.bias.abs().max().item()
    (0.1, 0.0)
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
