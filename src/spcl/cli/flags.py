"""From the flags of a command to settings."""

from pathlib import Path
from typing import Any

__all__ = ["settings_from"]


def settings_from(**flags: Any) -> dict[str, Any]:
    """The flags that were given, as settings; paths become absolute, so that a run can be repeated from anywhere.

    >>> settings_from(seed=0, benchmark=None, fit=False)
    {'seed': 0, 'fit': False}
    """
    given = {name: flag for name, flag in flags.items() if flag is not None}
    return {name: str(flag.resolve()) if isinstance(flag, Path) else flag for name, flag in given.items()}
