"""A trial of whether one pass over several batches gives what a pass over each of them gives."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spcl.batches import Inputs, concatenate, map_leaves, number_of_samples
from spcl.engine.gradients import GradientMatrix
from spcl.engine.reduction import ReductionPlan
from spcl.engine.segmented_mode import SegmentedMode
from spcl.engine.segments import SegmentGradients, Segments, UnsupportedError
from spcl.engine.snapshot import BufferSnapshot

__all__ = ["Joining", "Trial", "WithoutDropout"]

Joining = Literal["segments", "rows"]
"""What one pass can cover: batches with separate gradients, or only those whose gradients are added."""

SAMPLES, ATTEMPTS = 4, 4
DROPOUTS = {
    getattr(functional, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}


class WithoutDropout(TorchFunctionMode):
    """Turns dropout off within the block, so that passes over the same samples can be compared.

    >>> with WithoutDropout():
    ...     nn.Dropout(0.5)(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function without dropout."""
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args, kwargs = [*args[:4], *(0.0 for _ in args[4:5]), *args[5:]], {**(kwargs or {})}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **(kwargs or {}))


class Trial:
    """Passes over a few samples of one or two batches, together and one after the other, from the same buffers.

    Features, gradients and buffers must be the same up to rounding. So networks are found that mix the samples of a
    batch, draw random numbers other than dropout's, or use parameters in ways that segments cannot follow.
    """

    def __init__(
        self,
        backbone: nn.Module,
        parameters: Sequence[nn.Parameter],
        names: dict[nn.Parameter, str],
        counters: Sequence[Tensor],
        snapshot: BufferSnapshot,
    ) -> None:
        self._backbone = backbone
        self._parameters = parameters
        self._names = names
        self._counters = counters
        self._snapshot = snapshot

    def run(self, batches: Sequence[Inputs]) -> tuple[Joining | None, str | None]:
        """Return what one pass can cover, and why it cannot cover more; (None, None) if these samples do not tell.

        Errors that a pass over one batch raises are the caller's.
        """
        for attempt in range(ATTEMPTS):
            first = attempt * SAMPLES
            parts = [map_leaves(lambda leaf: leaf[first : first + SAMPLES], x) for x in batches]  # noqa: B023
            if attempt and any(number_of_samples(x) < 2 for x in parts):
                break
            result = self._attempt(parts)
            if result[0] == "segments":
                return result
        return result

    def _attempt(self, parts: Sequence[Inputs]) -> tuple[Joining | None, str | None]:
        generators = {parameter.device for parameter in self._parameters if parameter.is_cuda}
        exact = torch.backends.cudnn.flags(enabled=False)  # it rounds more, and takes long to begin with other sizes
        with torch.random.fork_rng(devices=generators), WithoutDropout(), torch.enable_grad(), exact:
            expected = self._separate(parts)
            if not all(map(isfinite, _norms(expected))):
                return None, None
            reason = self._difference(self._segmented, parts, expected)
            if reason is None:
                return "segments", None
            expected = _with_summed_gradients(expected, len(parts), len(self._parameters))
            other = self._difference(self._added, parts, expected)
            return (None, other) if other is not None else ("rows", reason)

    def _difference(
        self, compute: Callable[[Sequence[Inputs]], list[Tensor]], parts: Sequence[Inputs], expected: Sequence[Tensor]
    ) -> str | None:
        try:
            found = compute(parts)
        except UnsupportedError as error:
            return str(error)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
            return f"a pass over several batches raised {type(error).__name__}: {error}"
        finally:
            self._snapshot.restore()
            for parameter in self._parameters:
                parameter.grad = None
        if _are_close(found, expected):
            return None
        return "the features or gradients of a sample depend on the other samples of the pass, or on random numbers"

    def _separate(self, parts: Sequence[Inputs]) -> list[Tensor]:
        """Return features, gradients and buffers of one pass per batch."""
        try:
            features = [self._backbone(x) for x in parts]
            gradients = [
                gradient
                for each, by in zip(features, _cotangents(features), strict=True)
                for gradient in self._gradients(each, by)
            ]
            return [torch.cat([each.detach() for each in features]), *self._buffers(), *gradients]
        finally:
            self._snapshot.restore()

    def _segmented(self, parts: Sequence[Inputs]) -> list[Tensor]:
        """Return the same from one pass, by segments."""
        sizes = tuple(number_of_samples(x) for x in parts)
        segments = Segments(sizes, tuple(range(len(sizes))))
        matrix = GradientMatrix(self._parameters, like=torch.empty(0))
        matrix.begin(ReductionPlan.make([str(row) for row in segments.rows], "none", separate=True))
        target = SegmentGradients(matrix, segments, fresh=True)
        mode = SegmentedMode(segments, target, self._names, self._counters)
        features = mode.run(self._backbone, concatenate(parts))
        if features.requires_grad:
            torch.autograd.backward(features, torch.cat(_cotangents(torch.split_with_sizes(features, sizes))))
        target.finish()
        check_unused(self._names)
        gradients = [view for row in matrix.rows for view in matrix.views(row)]
        return [features.detach(), *self._buffers(), *gradients]

    def _added(self, parts: Sequence[Inputs]) -> list[Tensor]:
        """Return features, buffers and the sum of the gradients from one pass."""
        sizes = tuple(number_of_samples(x) for x in parts)
        mode = SegmentedMode(Segments(sizes, (0,) * len(sizes)), None, self._names, self._counters)
        features = mode.run(self._backbone, concatenate(parts))
        gradients = self._gradients(features, torch.cat(_cotangents(torch.split_with_sizes(features, sizes))))
        return [features.detach(), *self._buffers(), *gradients]

    def _gradients(self, features: Tensor, by: Tensor) -> list[Tensor]:
        if not (self._parameters and features.requires_grad):
            return [torch.zeros_like(parameter) for parameter in self._parameters]
        return list(torch.autograd.grad(features, self._parameters, by, allow_unused=True, materialize_grads=True))

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self._backbone.buffers()]


def check_unused(names: dict[nn.Parameter, str]) -> None:
    """Refuse parameters that autograd has found a gradient of: they are used in ways that were not noticed."""
    for parameter, name in names.items():
        if parameter.grad is not None:
            raise UnsupportedError(f"the parameter {name!r} is used where segments cannot follow")


def _cotangents(features: Sequence[Tensor]) -> list[Tensor]:
    """Return fixed gradients of the features that are not alike for any two samples."""
    return [
        torch.arange(1, each.numel() + 1, dtype=each.dtype, device=each.device).cos().view_as(each) / (1 + index)
        for index, each in enumerate(features)
    ]


def _with_summed_gradients(tensors: list[Tensor], batches: int, parameters: int) -> list[Tensor]:
    others = tensors[: len(tensors) - batches * parameters]
    gradients = [tensors[len(others) + start :: parameters] for start in range(parameters)]
    return [*others, *(torch.stack(some[:batches]).sum(dim=0) for some in gradients)]


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether all differences are small against the tensors, or very small against the largest of them."""
    tolerances = [
        max(1e-3, torch.finfo(each.dtype).eps ** 0.5 if each.is_floating_point() else 0.0) for each in expected
    ]
    differences = [one.double() - other.double() for one, other in zip(found, expected, strict=True)]
    errors, sizes = _norms(differences), _norms(expected)
    largest = max(sizes, default=0.0)
    triples = zip(errors, sizes, tolerances, strict=True)
    return all(error <= tolerance * (size + 0.01 * largest) for error, size, tolerance in triples)


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the tensors' norms, with one synchronisation."""
    if not tensors:
        return []
    norms: list[float] = torch.stack(torch._foreach_norm([tensor.double() for tensor in tensors])).tolist()
    return norms
