"""Specification of a figure of the paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from spcl.errors import SpclError
from spcl.results.grid_command import GridCommand
from spcl.results.records import RunRecord

__all__ = ["FigureSpec", "MissingRunsError"]


class MissingRunsError(SpclError):
    """Error for runs that do not suffice for a figure."""


@dataclass(frozen=True)
class FigureSpec:
    """A figure by name.

    Attributes:
        name: its name for ``spcl figure``.
        number: its number in the paper.
        title: its subject, in a few words.
        caption: its description, in a sentence or two.
        needs: the runs it is drawn from.
        grids: commands that make such runs.
        draw: function from runs, of which it draws the complete ones, to a figure and the end of its caption; raises
            `MissingRunsError` that says what is missing.
    """

    name: str
    number: str
    title: str
    caption: str
    needs: str
    grids: tuple[GridCommand, ...]
    draw: Callable[[Sequence[RunRecord]], tuple[Figure, str]]

    def commands(self) -> list[str]:
        """Return the commands that make runs for this figure."""
        return [grid.text(f"results/{self.name}") for grid in self.grids]
