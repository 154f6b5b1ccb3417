"""Trackers: reporting a run to TensorBoard or Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from spcl.errors import SpclError

__all__ = ["TensorBoardTracker", "Tracker", "WandbTracker"]


class Tracker(Protocol):
    """Receive the metrics of a run while it trains."""

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        ...

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        ...

    def close(self) -> None:
        """Write what is left and close the connection."""
        ...


class TensorBoardTracker:
    """Write TensorBoard event files to a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SpclError('TensorBoard is not installed; run: pip install "spcl[tensorboard]"') from error
        self._writer = SummaryWriter(str(folder))

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        for name, value in _scalars(values).items():
            self._writer.add_scalar(name, value, step)

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        for task, value in accuracies.items():
            self._writer.add_scalar(f"accuracy/{task}", value, step)

    def close(self) -> None:
        """Write what is left and close the connection."""
        self._writer.close()


class WandbTracker:
    """Report to a project of Weights & Biases."""

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SpclError('Weights & Biases is not installed; run: pip install "spcl[wandb]"') from error
        self._run = wandb.init(project=project, config=dict(settings))

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        self._run.log(_scalars(values), step=step)

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        self._run.log({f"accuracy/{task}": value for task, value in accuracies.items()}, step=step)

    def close(self) -> None:
        """Write what is left and close the connection."""
        self._run.finish()


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Flatten nested numbers to paths.

    >>> _scalars({"losses": {"a": 1.0}, "before": None})
    {'losses/a': 1.0}
    """
    flat: dict[str, float] = {}
    for group, inner in values.items():
        if isinstance(inner, Mapping):
            flat |= {f"{group}/{name}": value for name, value in inner.items() if isinstance(value, float)}
    return flat
