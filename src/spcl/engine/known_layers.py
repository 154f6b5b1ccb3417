"""Layers of which it is known that they treat every sample, or with batch-norm every batch, by itself."""

from torch import nn

__all__ = ["consists_of_known_layers"]

OWN = "spcl.models."
CONTAINERS = {nn.Sequential, nn.ModuleList, nn.Identity}
LAYERS = {nn.Linear, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d}
NORMALISATIONS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm}
ACTIVATIONS = {nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Dropout2d}
KNOWN = CONTAINERS | LAYERS | NORMALISATIONS | ACTIVATIONS


def consists_of_known_layers(network: nn.Module) -> bool:
    """Return whether a network is made of such layers only, and nothing changes what they do.

    >>> consists_of_known_layers(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    True
    >>> consists_of_known_layers(nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=0)))
    False
    >>> consists_of_known_layers(nn.Sequential(norm := nn.BatchNorm1d(3), nn.ReLU(), norm))
    False
    """
    uses = [module for _, module in network.named_modules(remove_duplicate=False)]
    is_simple = len(uses) == len(set(uses))  # batch-norm that is used twice would see the batches in another order
    return is_simple and all(_is_known(module) and not _is_changed(module) for module in uses)


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1
    if isinstance(module, nn.Embedding):
        return not (module.max_norm or module.scale_grad_by_freq or module.sparse)
    return type(module) in KNOWN or type(module).__module__.startswith(OWN)


def _is_changed(module: nn.Module) -> bool:
    """Return whether a module has hooks, a method of its own, or a padding that segments cannot follow."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module) or isinstance(getattr(module, "padding", 0), str)
