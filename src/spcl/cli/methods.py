"""``spcl methods``."""

__all__ = ["methods"]


def methods() -> None:
    """List the methods."""
