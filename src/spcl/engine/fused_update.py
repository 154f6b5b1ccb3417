"""Steps of optimisers that update all tensors of a group in one call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = ["make_step"]

ADAMS = (Adam, AdamW)
FUSED = (*ADAMS, torch.optim.SGD)
"""Optimisers that can update all tensors of a group in one call."""

PLAIN = (Tensor, nn.Parameter)
"""Tensors that are not sharded."""


def make_step(optimizer: Optimizer) -> None:
    """Make the optimiser's step, in one call for a group where it can and the user leaves it the choice.

    On a CPU PyTorch makes a dozen calls for every tensor by itself; with 64 heads that takes four times as long.
    """
    if not _step_adam(optimizer):
        with _fused(optimizer):
            optimizer.step()


# -- Adam, called directly


@torch.no_grad()
def _step_adam(optimizer: Optimizer) -> bool:
    """Make a step of Adam by its kernel alone; return False, having done nothing, where PyTorch has more to do.

    What PyTorch does for every tensor around the kernel takes longer than the kernel for small heads.
    """
    if type(optimizer) not in ADAMS or _is_watched(optimizer):
        return False
    groups = optimizer.param_groups
    if not all(group["fused"] is not False and _is_free(group) for group in groups):
        return False
    trained = [[parameter for parameter in group["params"] if parameter.grad is not None] for group in groups]
    states = [[optimizer.state.get(parameter) for parameter in some] for some in trained]
    is_new = not all(all(some) for some in states)
    if is_new or any(len({parameter.dtype for parameter in some}) > 1 for some in trained):
        return False
    for group, parameters, entries in zip(groups, trained, states, strict=True):
        _update_adam(type(optimizer), group, parameters, entries)
    return True


def _is_watched(optimizer: Optimizer) -> bool:
    """Return whether a step is more than the kernel: with hooks, a scheduler that counts steps, or scaled gradients."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    others = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    return not vars(optimizer).keys().isdisjoint(("step", "grad_scale", "found_inf")) or any(own) or any(others)


def _update_adam(
    kind: type[Optimizer], group: Mapping[str, Any], parameters: Sequence[Tensor], states: Sequence[Any]
) -> None:
    """Update the parameters of a group, which have a gradient and a state."""
    if not parameters:
        return
    shared = _shared_steps(states)
    steps, means, squares = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
    largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
    gradients = [parameter.grad for parameter in parameters]
    beta1, beta2 = group["betas"]
    names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
    options = {name: group[name] for name in names} | {"beta1": beta1, "beta2": beta2}
    is_decoupled = kind is AdamW or group.get("decoupled_weight_decay")
    kernel: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    shared.add_(1.0)
    kernel(parameters, gradients, means, squares, largest, steps, **options)


def _shared_steps(states: Sequence[Any]) -> Tensor:
    """Return the steps that the parameters have made as one tensor, of which those of every state are views."""
    shared: Tensor | None = states[0]["step"]._base
    if shared is None or shared.shape != (len(states),) or any(state["step"]._base is not shared for state in states):
        shared = torch.stack([state["step"] for state in states])
        for state, step in zip(states, shared.unbind(), strict=True):
            state["step"] = step
    return shared


# -- other optimisers, told to use one call


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimiser update all tensors of a group in one call, where it can and the user leaves it the choice."""
    groups = [group for group in optimizer.param_groups if type(optimizer) in FUSED]
    before = [group["fused"] for group in groups]
    for group in groups:
        is_chosen = group["fused"] or (group["fused"] is None and _is_free(group))
        group["fused"] = (not _starts_momentum(optimizer, group)) if is_chosen else group["fused"]
    try:
        yield
    finally:
        for group, fused in zip(groups, before, strict=True):
            group["fused"] = fused


def _is_free(group: Mapping[str, Any]) -> bool:
    """Return whether a group leaves it to PyTorch how its tensors are updated, and one call can update all of them."""
    if group["foreach"] is not None or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    return all(map(_is_plain, group["params"]))


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a tensor on a CPU, and its gradient, are numbers without gaps: the call ignores strides."""
    gradient = parameter.grad
    is_dense = gradient is None or (not gradient.is_sparse and gradient.is_contiguous())
    is_number = parameter.is_cpu and parameter.is_floating_point() and parameter.is_contiguous()
    return type(parameter) in PLAIN and is_number and is_dense


def _starts_momentum(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether some tensors, but not all, have no momentum yet, which the fused SGD cannot compute."""
    if not group.get("momentum"):
        return False
    trained = (parameter for parameter in group["params"] if parameter.grad is not None)
    return len({optimizer.state[parameter].get("momentum_buffer") is None for parameter in trained}) > 1
