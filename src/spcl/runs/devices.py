"""Devices by name."""

import torch

from spcl.errors import SpclError
from spcl.suggestions import did_you_mean

__all__ = ["DeviceError", "check_device", "pick_device"]

USUAL = ("auto", "cpu", "cuda", "cuda:0", "mps")


class DeviceError(SpclError):
    """A device that cannot compute here."""


def check_device(name: str) -> None:
    """Refuse a name that PyTorch does not know; whether there is such a device here is another question.

    >>> check_device("cuda:7")
    >>> check_device("gpu:1")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no device 'gpu:1'; did you mean 'cuda:1'?
    """
    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError:
        kind, colon, number = name.partition(":")
        hint = f"did you mean 'cuda{colon}{number}'?" if kind.lower() == "gpu" else did_you_mean(name, USUAL)
        raise SpclError(f"there is no device {name!r}; {hint}") from None


def pick_device(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # "meta" has tensors, but no values in them
    except (RuntimeError, AssertionError, ImportError) as error:
        has_none = name.partition(":")[0] == "mps" and not torch.backends.mps.is_available()
        reason = "there is none on this machine" if has_none else str(error).splitlines()[0]
        raise DeviceError(f"cannot use device {name!r}: {reason}; choose another, such as cpu") from error
    return device
