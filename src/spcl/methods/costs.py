"""Cost of a step, as far as a method's declarations determine it."""

from dataclasses import dataclass

from spcl.methods.base import Method

__all__ = ["Cost", "cost_of"]


@dataclass(frozen=True)
class Cost:
    """Cost of a step beyond one pass per task and one over a batch of memory.

    Attributes:
        gradients: number of gradients of the shared parameters held at once, for T tasks and memory.
        gradients_with_stability: the same while stability is measured, which takes every gradient by itself.
        forwards: further forward passes over a batch of memory.
        memory: what memory stores.
    """

    gradients: str
    gradients_with_stability: str
    forwards: int
    memory: str


def cost_of(method: Method) -> Cost:
    """Return the cost of a method with its settings.

    >>> from spcl.methods import DERPP, SORO
    >>> cost_of(SORO())
    Cost(gradients='T + 1', gradients_with_stability='T + 1', forwards=0, memory='samples')
    >>> cost_of(DERPP())
    Cost(gradients='2', gradients_with_stability='T + 1', forwards=1, memory='samples and logits')
    """
    penalty = bool(method.settings.alpha)
    every = f"T + {1 + penalty}"
    held = {"none": every, "mean": f"{2 + penalty}", "sum": "2"}[method.reduction]
    forwards = method.draws * (1 + 2 * method.edits_memory) - 1
    memory = "samples" + " as floats" * method.edits_memory + " and logits" * method.stores_logits
    return Cost(held, every, forwards, memory)
