"""Train in child processes that are killed at random moments; run as `python _crash.py FOLDER KILLS`.

PyTorch is imported once, and every child is a fork of this process. FOLDER/whole is the last checkpoint of a child that
nobody disturbed, FOLDER/killed that of a run that was killed KILLS times. Prints how often training was resumed, how
often a child died while it was writing, and how many steps the run had.
"""

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from _learning import TinyResNet, images
from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import SORO
from spcl.streams import ParallelStream, Timeline


def make_stream() -> ParallelStream:
    labels = torch.arange(480) % 6
    label_set = ((0, 1), (2, 3), (4, 5))
    return ParallelStream(images(480, 0), labels, label_set, Timeline(((0, 39), (20, 59), (35, 74))), 4, seed=0)


def start() -> Learner:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return Learner(
        TinyResNet(dropout=0.2),
        SORO(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        memory=BalancedCoreset(12),
        scenario="class",
    )


def train(path: Path, saved: int) -> None:
    """Go on from the checkpoint, or begin; save after every moment and say so."""
    stream = make_stream()
    resumed = path.exists()
    learner = Learner.load(path, backbone=TinyResNet(dropout=0.2, seed=9), stream=stream) if resumed else start()
    for moment in stream:
        for name in moment.started:
            learner.add_task(name, classes=stream.classes[name])
        learner.step(moment.batches)
        for name in moment.ended:
            learner.finish_task(name)
        learner.save(path, stream=stream)
        os.write(saved, b".")


def fork(path: Path) -> tuple[int, int]:
    """The process, and where to read a byte for every checkpoint it has written."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            train(path, writer)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    return child, reader


def undisturbed(path: Path) -> None:
    child, reader = fork(path)
    while os.read(reader, 100):
        pass
    assert os.waitpid(child, 0)[1] == 0


def killed(path: Path, after: int, delay: float) -> None:
    """Kill it after `after` checkpoints and `delay` more seconds."""
    child, reader = fork(path)
    for _ in range(after):
        assert os.read(reader, 1), "the run ended before it was killed often enough"
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reader)


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)  # a forked child must not wait for its parent's threads
    start()  # imports what an optimiser needs, once for all children
    begin, steps = time.perf_counter(), len(make_stream())
    undisturbed(folder / "whole")
    step = (time.perf_counter() - begin) / steps
    chance = random.Random(0)
    resumed = writing = 0
    for _ in range(kills):
        resumed += (folder / "killed").exists()
        killed(folder / "killed", after=chance.randint(0, 3), delay=chance.uniform(0, step))
        writing += any(file.name.endswith(".partial") for file in folder.iterdir())
    undisturbed(folder / "killed")
    print(resumed, writing, steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
