"""What a backbone is built for: the shape and type of the samples."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputSpec:
    """Shape and type of one sample, from which a backbone is built.

    Attributes:
        shape: of one sample without the dimension of the batch; of the first part where samples have several.
        dtype: ``torch.uint8`` for images as bytes, ``torch.int64`` for tokens, otherwise floating point. Bytes are
            normalised to floats before they reach the backbone.
        vocabulary: for tokens, one more than the largest in the training data.
        parts: the inputs of every part, by name or position, where samples are dicts or tuples of tensors.

    >>> InputSpec.of(torch.zeros(10, 3, 32, 32)).shape
    (3, 32, 32)
    >>> InputSpec.of({"input_ids": torch.tensor([[1, 9]]), "attention_mask": torch.tensor([[1, 0]])}).vocabulary
    10
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    vocabulary: int | None = None
    parts: Mapping[str, "InputSpec"] | None = None

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
