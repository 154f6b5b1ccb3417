"""Freezing parts of a backbone: which parameters are trained, and which normalisation layers keep their statistics."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from spcl.errors import SpclError
from spcl.learner.state import uncompiled
from spcl.suggestions import did_you_mean

__all__ = ["frozen_normalisations", "matching", "trainable"]


def matching(backbone: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters whose names match any of the patterns; without patterns all.

    >>> backbone = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3))
    >>> sorted(len(parameter) for parameter in matching(backbone, ["*.bias"]))
    [2, 3]
    >>> matching(backbone, ["0.wieght"])
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: no parameter of the backbone matches '0.wieght'; did you mean '0.weight'?
    """
    named = dict(uncompiled(backbone).named_parameters())
    found: set[nn.Parameter] = set()
    for pattern in patterns or ["*"]:
        matches = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if patterns and not matches:
            raise SpclError(f"no parameter of the backbone matches {pattern!r}; {did_you_mean(pattern, named)}")
        found.update(matches)
    return found


@contextmanager
def trainable(backbone: nn.Module, chosen: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let these parameters, and no others, be trained from now on; undone if the block raises."""
    chosen = set(chosen)
    before = {parameter: parameter.requires_grad for parameter in backbone.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(parameter in chosen and parameter.is_floating_point())
        yield
    except BaseException:
        for parameter, was_trainable in before.items():
            parameter.requires_grad_(was_trainable)
        raise


def frozen_normalisations(backbone: nn.Module) -> list[nn.Module]:
    """Return the layers with running statistics whose own parameters are all frozen.

    Those without parameters of their own are among them if the whole backbone is frozen.
    """
    all_frozen = not any(parameter.requires_grad for parameter in backbone.parameters())
    layers = [module for module in backbone.modules() if isinstance(module, _NormBase)]
    return [layer for layer in layers if _is_frozen(layer, all_frozen)]


def _is_frozen(layer: nn.Module, if_without_parameters: bool) -> bool:
    flags = [parameter.requires_grad for parameter in layer.parameters(recurse=False)]
    return not any(flags) if flags else if_without_parameters
