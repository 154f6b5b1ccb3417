"""Drawings of timelines for the terminal."""

from collections.abc import Sequence

from rich.text import Text

from spcl.streams import Timeline

__all__ = ["draw_timeline"]

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def draw_timeline(
    timeline: Timeline, width: int = 60, *, names: Sequence[str] | None = None, now: int | None = None
) -> Text:
    """Draw a bar for each task and one for memory, which starts when the first task has ended.

    Args:
        timeline: The timeline to draw.
        width: Width of the bars in characters, without names.
        names: The tasks' names; by default their numbers.
        now: The current step; later steps are drawn lighter.

    >>> print(draw_timeline(Timeline(((0, 3), (2, 7))), 16, names=["camera", "lidar"], now=5))
    camera ████████
    lidar      ██████░░░░░░
    memory         ██░░░░░░
           0              7
    """
    tasks, steps = len(timeline.spans), timeline.steps
    titles = [*(names or map(str, range(tasks))), "memory"]
    spans = [*timeline.spans, (timeline.memory_start, steps - 1)]
    styles = [*(COLOURS[task % len(COLOURS)] for task in range(tasks)), "white"]
    margin = max(map(len, titles)) + 1
    drawing = Text()
    for title, span, style in zip(titles, spans, styles, strict=True):
        drawing.append(f"{title:{margin}}").append(_bar(span, steps, width, now).rstrip() + "\n", style)
    return drawing.append(" " * margin + f"0{steps - 1:>{width - 1}}", "dim")


def _bar(span: tuple[int, int], steps: int, width: int, now: int | None) -> str:
    first, last = span
    if last < first:
        return ""
    begin, end = first * width // steps, -(-(last + 1) * width // steps)
    past = end if now is None else min(max(now * width // steps, begin), end)
    return " " * begin + "█" * (past - begin) + "░" * (end - past)
