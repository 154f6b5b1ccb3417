"""Modules and their saved weights."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from spcl.batches import describe
from spcl.errors import CheckpointError

__all__ = ["check_fits", "check_same", "shares_trained", "uncompiled"]


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was applied to, or the module itself."""
    return getattr(module, "_orig_mod", module)


def shares_trained(module: nn.Module, others: Iterable[nn.Module]) -> bool:
    """Return whether a module has trainable parameters of the others.

    >>> layer = nn.Linear(1, 1)
    >>> shares_trained(nn.Sequential(layer), [layer]), shares_trained(layer, [nn.Linear(1, 1)])
    (True, False)
    """
    known = {parameter for other in others for parameter in other.parameters() if parameter.requires_grad}
    return not known.isdisjoint(module.parameters())


def check_fits(what: str, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raise an error unless the saved tensors fit a module."""
    check_same(what, module.state_dict(), saved)


def check_same(what: str, mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise an error unless two sets of tensors have the same names, shapes and types."""
    here = {name: describe(tensor) for name, tensor in mine.items()}
    there = {name: describe(tensor) for name, tensor in saved.items()}
    if here != there:
        names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        first = names[0]
        raise CheckpointError(
            f"{what} does not fit the checkpoint in {len(names)} tensors, e.g. {first!r}: "
            f"{here.get(first, 'missing')} here, {there.get(first, 'missing')} in the checkpoint"
        )
