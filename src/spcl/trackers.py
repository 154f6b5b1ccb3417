"""Trackers: reporting a run to TensorBoard or Weights & Biases."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from spcl._util.registry import Registry
from spcl.errors import SpclError, install_command

__all__ = [
    "TRACKERS",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "check_installed",
    "close_tracker",
    "tracker_errors",
]


class Tracker(Protocol):
    """Receive the metrics of a run while it trains."""

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        ...

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        ...

    def result(self, measures: Mapping[str, float]) -> None:
        """Report A, F and what else was measured of the complete run, in per cent."""
        ...

    def close(self) -> None:
        """Write what is left and close the connection."""
        ...


TRACKERS: Registry[Callable[..., Tracker]] = Registry("tracker", positional=2)
"""Classes of trackers, or functions ``make(folder, settings, **options)`` of one.

``folder`` is the folder of the run, ``settings`` are its settings by dotted name. An attribute ``requires`` names the
library that must be installed, with an extra of the same name.
"""


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Write TensorBoard event files to the folder ``tensorboard`` of the run, with its settings as hyper-parameters."""

    requires: ClassVar[str] = "tensorboard"

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        check_installed(self.requires)
        from torch.utils.tensorboard import SummaryWriter

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

    def result(self, measures: Mapping[str, float]) -> None:
        """Write the settings with the measures, for the page of hyper-parameters."""
        simple = {name: value for name, value in self._settings.items() if isinstance(value, bool | int | float | str)}
        self._writer.add_hparams(simple, dict(measures), run_name=".")

    def close(self) -> None:
        """Write what is left and close the connection."""
        self._writer.close()


@TRACKERS.register("wandb")
class WandbTracker:
    """Report to a project of Weights & Biases."""

    requires: ClassVar[str] = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, project: str) -> None:
        check_installed(self.requires)
        import wandb

        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings))

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Report the losses, weights and stability of a training step."""
        self._run.log(_scalars(values), step=step)

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        """Report accuracies in per cent."""
        self._run.log({f"accuracy/{task}": value for task, value in accuracies.items()}, step=step)

    def result(self, measures: Mapping[str, float]) -> None:
        """Report the measures of the complete run in its summary."""
        self._run.summary.update(dict(measures))

    def close(self) -> None:
        """Write what is left and close the connection."""
        self._run.finish()


@contextmanager
def tracker_errors(tracker: Tracker) -> Iterator[None]:
    """Raise whatever a tracker raises as an error that names it."""
    try:
        yield
    except Exception as error:
        kind = type(tracker).__name__
        raise SpclError(
            f"the tracker {kind} raised {type(error).__name__}: {error}; leave it out or mend it"
        ) from error


def close_tracker(tracker: Tracker) -> None:
    """Close a tracker, which need not say how."""
    with tracker_errors(tracker):
        getattr(tracker, "close", lambda: None)()


def check_installed(library: str) -> None:
    """Raise an error that says what to install, if the library is missing."""
    try:
        found = sys.modules.get(library, find_spec(library))
    except ValueError:
        found = None
    if found is None:
        raise SpclError(f"{library} is not installed; run: {install_command(library)}")


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
