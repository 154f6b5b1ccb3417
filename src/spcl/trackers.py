"""Trackers: reporting a run to TensorBoard or Weights & Biases."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from spcl.errors import SpclError
from spcl.registry import Registry

__all__ = ["TRACKERS", "TensorBoardTracker", "Tracker", "WandbTracker"]


class Tracker(Protocol):
    """Receive the metrics of a run while it trains."""

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        ...

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        ...

    def result(self, accuracy: float, forgetting: float) -> None:
        """Report A and F of the complete run."""
        ...

    def close(self) -> None:
        """Write what is left and close the connection."""
        ...


TRACKERS: Registry[Callable[..., Tracker]] = Registry("tracker", positional=2)
"""Classes of trackers, or functions ``make(folder, settings, **options)`` of one.

``folder`` is that of the run, ``settings`` are its settings by dotted name.
"""


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Write TensorBoard event files to the folder ``tensorboard`` of the run, with its settings as hyper-parameters."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SpclError('TensorBoard is not installed; run: pip install "spcl[tensorboard]"') from error
        self._settings = settings
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        for name, value in _scalars(values).items():
            self._writer.add_scalar(name, value, step)

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        for task, value in accuracies.items():
            self._writer.add_scalar(f"accuracy/{task}", value, step)

    def result(self, accuracy: float, forgetting: float) -> None:
        """Write the settings with A and F, for the page of hyper-parameters."""
        simple = {name: value for name, value in self._settings.items() if isinstance(value, bool | int | float | str)}
        self._writer.add_hparams(simple, {"A": accuracy, "F": forgetting}, run_name=".")

    def close(self) -> None:
        """Write what is left and close the connection."""
        self._writer.close()


@TRACKERS.register("wandb")
class WandbTracker:
    """Report to a project of Weights & Biases."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SpclError('Weights & Biases is not installed; run: pip install "spcl[wandb]"') from error
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings))

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        self._run.log(_scalars(values), step=step)

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        self._run.log({f"accuracy/{task}": value for task, value in accuracies.items()}, step=step)

    def result(self, accuracy: float, forgetting: float) -> None:
        """Report A and F of the complete run in its summary."""
        self._run.summary.update({"A": accuracy, "F": forgetting})

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
