"""A service against the bare learner on the same batches, the latency of predictions meanwhile, and its memory.

Throughput: batches of many sources wait in a hub in a folder. A service learns them, with all that belongs to it
(reading, decoding, checks, prequential accuracies, checkpoints, copies of the weights, history); the bare learner takes
the same steps on the same batches, which it has in memory. They take turns, in one process; the ratio is the median
over the rounds, by the clock and in processor time, which a busy machine disturbs less.

Latency: the service runs as a process of its own and trains without a pause, while one client asks for predictions.

Memory: with --minutes, the resident memory of that process every ten seconds, with sources that never end. Its slope is
that of a line through the second half.

    python benchmarks/serve.py [--sources 64] [--rounds 5] [--seconds 20] [--minutes 30]
"""

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median, quantiles
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

import torch
import yaml
from rich.console import Console
from rich.table import Table

from spcl.serve import Event, ServeSettings, StepEvent
from spcl.serve.history import History
from spcl.serve.predictor import Predictor
from spcl.serve.service import Service
from spcl.sources import FolderHub, Publisher

CLASSES, BATCH = 10, 32
TARGET = 0.9
SHAPES: dict[str, list[int]] = {"mlp": [784], "cnn": [3, 32, 32]}
Batch = tuple[torch.Tensor, torch.Tensor]


def settings(folder: Path, backbone: str, **more: Any) -> dict[str, Any]:
    return {
        "state": str(folder / "state"),
        "source": {"name": "folder", "path": str(folder / "hub")},
        "inputs": {"shape": SHAPES[backbone]},
        "learner": {"method": "soro", "backbone": backbone, "memory": "reservoir", "memory_budget": 1000},
        "http": {"port": 0},
        **more,
    }


def moments(backbone: str, sources: int, count: int) -> list[dict[str, Batch]]:
    draws = torch.Generator().manual_seed(0)
    return [
        {
            f"source-{source}": (
                torch.randn(BATCH, *SHAPES[backbone], generator=draws),
                torch.randint(CLASSES, (BATCH,), generator=draws),
            )
            for source in range(sources)
        }
        for _ in range(count)
    ]
