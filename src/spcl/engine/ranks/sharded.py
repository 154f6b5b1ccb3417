"""Backbones that ``torch.distributed.fsdp.fully_shard`` has sharded over the ranks that split batches.

Gradients, optimiser state and weight averages are shards, too. FSDP gathers parameters for a pass and adds up gradients
over the ranks; everything else works as without FSDP.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from spcl.engine.base import Rule
from spcl.engine.eager import EagerEngine
from spcl.engine.model import SharedModel
from spcl.engine.ranks.engine import DistributedEngine
from spcl.engine.ranks.shares import ShardSlices
from spcl.engine.ranks.world import Group, World
from spcl.engine.rows import GradientMatrix
from spcl.engine.update import Update, WeightAverage
from spcl.errors import SpclError
from spcl.methods.base import Method

T = TypeVar("T")


def is_sharded(backbone: nn.Module) -> bool:
    """Return whether any part of the backbone is sharded."""
    return bool(_sharded_modules(backbone))


def refuse_sharded(backbone: nn.Module, done: str) -> None:
    """Raise if the backbone is sharded; ``done``, a participle, completes "a sharded backbone cannot be …"."""
    if is_sharded(backbone):
        raise SpclError(
            f"a backbone that is sharded by fully_shard cannot be {done}; do it before it is sharded, or load a "
            f"checkpoint with a backbone that is not sharded"
        )


def check_sharded(backbone: nn.Module, method: Method, world: World | None) -> None:
    """Raise if the backbone is sharded over ranks that do not split batches, or if the method forbids sharding."""
    if not is_sharded(backbone):
        return
    if world is None:
        raise SpclError("the backbone is sharded over ranks by fully_shard; pass them as distributed=")
    if not _is_sharded_module(backbone):
        raise SpclError("only parts of the backbone are sharded; call fully_shard for the backbone itself, too")
    _reshard(backbone)
    for name, parameter in backbone.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if parameter.requires_grad and (mesh is None or mesh.mesh.tolist() != world.data.members):
            raise SpclError(
                f"the backbone's parameter {name!r} is sharded over {'no ranks' if mesh is None else mesh}, but ranks "
                f'{world.data.members} split batches; call fully_shard(backbone, mesh=world.mesh["data"]), of the '
                f'world = join_world(split="data") that is given as distributed='
            )
    if reason := _obstacle(method):
        raise SpclError(f"{method!r} {reason}, which needs a backbone that is not sharded")
    if not hasattr(backbone, "set_force_sum_reduction_for_comms"):
        raise SpclError(
            f"sharded backbones need a PyTorch with FSDPModule.set_force_sum_reduction_for_comms, but this is "
            f"{torch.__version__}; install a later one"
        )


def _obstacle(method: Method) -> str | None:
    if method.elementwise:
        return "combines gradients entry by entry"
    if method.edits_memory:
        return "edits memory along the gradients"
    if method.settings.weigh_heads:
        return "weighs the gradients of heads, too"
    return "has an orthogonality penalty on whole layers" if method.settings.alpha > 0.0 else None


class _ShardedGradients(GradientMatrix):
    """The gradient matrix of a rank's shards: FSDP adds to the parameters' ``.grad``, which are views of a row.

    Args:
        parameters: the sharded parameters.
        like: gives type and device if there are no parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], like: Tensor | None = None) -> None:
        self._sharded: list[Any] = list(parameters)
        super().__init__([nn.Parameter(each, requires_grad=False) for each in _shards(parameters)], like)

    @override
    def assign_grads(self, row: int) -> None:
        for parameter, view in zip(self._sharded, self._views[row], strict=True):
            parameter.grad = view

    @override
    def views(self, vector: Tensor) -> list[Tensor]:
        from torch.distributed.tensor import DTensor

        return [
            DTensor.from_local(
                view, each.device_mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride()
            )
            for view, each in zip(super().views(vector), self._sharded, strict=False)
        ]

    @override
    def _release(self) -> None:
        super()._release()
        for parameter in self._sharded:
            parameter.grad = None


class _SameRows(GradientMatrix):
    """The rows of a rank's own matrix with the plan of all ranks, where ranks have no rows to exchange.

    Args:
        other: the rank's own gradient matrix.
    """

    def __init__(self, other: GradientMatrix) -> None:
        super().__init__(other.parameters, like=other.buffer)
        self._other = other

    @override
    def _reserve(self, count: int, exactly: bool) -> None:
        self.buffer = self._other.buffer
        self._row_tensors = list(self.buffer)


class _ShardEngine(EagerEngine):
    """Computes the gradients of a rank's shards, with one pass per batch."""

    matrix = _ShardedGradients

    def __init__(self, model: SharedModel, method: Method) -> None:
        super().__init__(model, method)
        self.one_pass = None


class ShardedEngine(DistributedEngine):
    """Engine of a sharded backbone: FSDP adds up the gradients of a task group and leaves each rank its shards.

    Args:
        model: the shared model.
        method: how gradients become an update.
        world: the ranks; the ranks of a task group each hold a shard of the backbone.
    """

    local_engine = _ShardEngine

    def __init__(self, model: SharedModel, method: Method, world: World) -> None:
        super().__init__(model, method, world)
        if world.tasks.size == 1 and self.local.gradients.length:
            self.gradients = _SameRows(self.local.gradients)
        self._shares.all_pass = True
        for module in _sharded_modules(model.backbone):
            module.set_gradient_divide_factor(1.0)  # the loss of a share has a factor already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction with a factor
        model.backbone.register_forward_hook(_after_pass, always_call=True)

    @override
    def _make_slices(self, length: int) -> ShardSlices:
        return ShardSlices(self.world, length)

    @contextmanager
    @override
    def _deferred_errors(self) -> Iterator[None]:
        with super()._deferred_errors():
            yield
        if self._error is not None:
            _reset(self.model.backbone)

    @override
    def combine(self, rule: Rule, *, check: bool) -> bool:
        is_finite = super().combine(rule, check=check)
        return not check or not self.world.any(not is_finite)

    @override
    def update(self, update: Update) -> None:
        self._assign_grads()
        if update.clip_norm is not None:
            parameters = [parameter for group in update.optimizer.param_groups for parameter in group["params"]]
            _clip(parameters, update.clip_norm, self.world.data)
        self.local.update(replace(update, clip_norm=None))


class ShardedAverage(WeightAverage):
    """The average of weights, some of them shards; values are copied in place, where FSDP gathers them."""

    @override
    @contextmanager
    def applied(self) -> Iterator[None]:
        pairs = list(zip(_shards(self._tensors), _shards(self._averages), strict=True))
        before = [value.clone() for value, _ in pairs]
        try:
            for value, average in pairs:
                value.copy_(average)
            yield
        finally:
            for (value, _), old in zip(pairs, before, strict=True):
                value.copy_(old)

    @override
    def _local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return _shards(tensors)


# -- tensors


def whole(state: T, keep: bool = True) -> T:
    """Return a state with whole tensors on the CPU in place of shards; all ranks call this together.

    Args:
        state: plain data and tensors.
        keep: whether this rank gets the whole tensors; otherwise it gets None in their places.
    """
    found: Any = state
    if isinstance(found, Mapping):
        found = {name: whole(value, keep) for name, value in found.items()}
    elif isinstance(found, list):
        found = [whole(value, keep) for value in found]
    elif _is_shard(found):
        gathered = found.full_tensor().cpu()
        found = gathered if keep else None
    return found  # type: ignore[no-any-return]


def sharded_like(saved: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved tensors, sharded if the tensor of the same name and shape is sharded here."""
    return {name: _sharded_like(value, here[name]) if name in here else value for name, value in saved.items()}


def _sharded_like(value: Any, here: Any) -> Any:
    if not (_is_shard(here) and isinstance(value, Tensor) and value.shape == here.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, here.device_mesh, here.placements, src_data_rank=None)


@torch.no_grad()
def _clip(parameters: Iterable[nn.Parameter], largest: float, group: Group) -> None:
    """Scale gradients, some of them shards, down to a total norm, as ``clip_grad_norm_`` does."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    squares = torch.zeros(2, device=gradients[0].device)  # whole gradients, shards
    for gradient in gradients:
        squares[int(_is_shard(gradient))] += torch.linalg.vector_norm(_shard(gradient)).square()
    norm = (squares[0] + group.sum(squares[1])).sqrt()
    torch._foreach_mul_(_shards(gradients), (largest / (norm + 1e-6)).clamp(max=1.0))


def _is_shard(value: object) -> bool:
    return hasattr(value, "full_tensor")  # importing DTensor to check the type would take longer than importing SPCL


def _shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    held: Any = tensor.detach()
    return held.to_local() if _is_shard(held) else held  # type: ignore[no-any-return]


def _shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [_shard(tensor) for tensor in tensors]


# -- modules


def _is_sharded_module(module: nn.Module) -> bool:
    return any(parent.__name__ == "FSDPModule" for parent in type(module).__mro__)  # without the import


def _sharded_modules(backbone: nn.Module) -> list[Any]:
    return [module for module in backbone.modules() if _is_sharded_module(module)]


def _reshard(backbone: nn.Module) -> None:
    """Free the parameters that were gathered for a pass: the backbone has shards again."""
    for module in _sharded_modules(backbone):
        module.reshard()


def _after_pass(backbone: nn.Module, inputs: object, features: object) -> None:
    """Reshard after a forward pass without a backward pass: FSDP leaves the outermost module gathered."""
    if features is None:
        _reset(backbone)
    elif not torch.is_grad_enabled():
        _reshard(backbone)


def _reset(backbone: nn.Module) -> None:
    """Let FSDP forget a pass that has failed."""
    _reshard(backbone)
    with suppress(AttributeError):  # earlier versions of PyTorch have no such state, nor has FSDP before the first pass
        backbone.reset_iter_state()  # type: ignore[operator]
