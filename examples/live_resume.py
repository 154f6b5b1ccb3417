"""Live training that survives a crash: the learner and the position in its sources continue from a checkpoint.

    python examples/live_resume.py [CHECKPOINT]

Sources cannot be rewound, but one that can skip, such as a file or a log, skips the batches that were delivered before.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

import spcl
from spcl.checkpoint import read_checkpoint
from spcl.learner import StepReport

BATCHES = {"left": 150, "upper": 100}


def recording(task: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(len(task))
    for _ in range(BATCHES[task]):
        x = torch.randn(16, 2, generator=generator)
        time.sleep(0.002)
        yield x, (x[:, list(BATCHES).index(task)] > 0).long()


def run(path: Path, on_step: Callable[[StepReport], None] | None = None) -> None:
    saved = read_checkpoint(path)["sources"]["stream"]["delivered"] if path.exists() else {}
    sources = {task: islice(recording(task), saved.get(task, 0), None) for task in BATCHES}
    with spcl.LiveStream(sources) as stream:
        if path.exists():
            learner = spcl.Learner.load(path, backbone=nn.Linear(2, 32), stream=stream)
            print(f"resumed after {learner.steps} steps and these batches: {saved}")
        else:
            learner = spcl.Learner(nn.Linear(2, 32), spcl.SORO(), memory=spcl.Reservoir(100))
        learner.fit(stream, checkpoint=path, every=0.05, on_start=partial(learner.add_task, classes=2), on_step=on_step)
    print(f"finished after {learner.steps} steps and these batches: {stream.delivered}")


def crash(report: StepReport) -> None:
    if report.step == 80:
        raise ConnectionError("power cut")


path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "checkpoint"
try:
    run(path, on_step=crash)
except ConnectionError as error:
    print(f"crashed: {error}")
    run(path)
