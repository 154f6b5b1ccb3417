"""Searches for hyper-parameters in the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spcl.files import read_json

__all__ = ["Tuning", "find_tunings"]


@dataclass(frozen=True)
class Tuning:
    """A search made by ``spcl tune``: its best trial, and Optuna's plots as Plotly figures."""

    folder: Path
    best: Mapping[str, Any]
    plots: Mapping[str, Any]


def find_tunings(folders: Sequence[str | Path]) -> list[Tuning]:
    """Return the searches in these folders and those below."""
    records = sorted({record.parent for folder in folders for record in Path(folder).rglob("tuning.json")})
    return [
        Tuning(
            folder,
            best=read_json(folder / "best.json") or {},
            plots={path.stem.replace("_", " "): read_json(path) for path in sorted((folder / "plots").glob("*.json"))},
        )
        for folder in records
    ]
