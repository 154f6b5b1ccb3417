"""The paper's three measures of stability, by their names in ``metrics.jsonl``."""

from typing import Literal

__all__ = ["MEASURES", "Measure"]

Measure = Literal["condition_number", "cosine", "magnitude_similarity"]

MEASURES: dict[Measure, str] = {
    "condition_number": "condition number κ",
    "cosine": "conflicts (cosine)",
    "magnitude_similarity": "magnitude similarity",
}
"""The titles of the measures."""
