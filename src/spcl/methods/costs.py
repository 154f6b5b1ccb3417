"""What a method costs in a step, as far as its declaration tells."""

from dataclasses import dataclass

from spcl.methods.base import Method

__all__ = ["Cost", "cost_of"]


@dataclass(frozen=True)
class Cost:
    """What a step takes beyond one pass per task and one over a batch of memory.

    Attributes:
        columns: how many gradients of the shared parameters are held at once, with T tasks and memory.
        forwards: further forward passes over a batch of memory.
        memory: what memory keeps.
    """

    columns: str
    forwards: int
    memory: str


def cost_of(method: Method) -> Cost:
    """The cost of a method with these settings.

    >>> from spcl.methods import DERPP, SORO
    >>> cost_of(SORO())
    Cost(columns='T + 1', forwards=0, memory='samples')
    >>> cost_of(DERPP())
    Cost(columns='2', forwards=1, memory='samples and logits')
    """
    penalty = bool(method.settings.alpha)
    held = {"none": f"T + {1 + penalty}", "mean": f"{2 + penalty}", "sum": "2"}[method.reduction]
    forwards = method.draws * (1 + 2 * method.edits_memory) - 1
    memory = "samples" + " as floats" * method.edits_memory + " and logits" * method.stores_logits
    return Cost(held, forwards, memory)
