"""A learning-rate schedule, gradient clipping and averaged weights, and how training continues from a checkpoint.

    python examples/schedule_and_clipping.py

A schedule is a function from the number of the step to a factor of the learning rate. It is not saved, so `load` gets
it again. On a GPU with a capturable optimiser, clipping, the optimiser's step and the average are one CUDA graph.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

import spcl
from spcl.schedules import Cosine

STEPS = 200
SCHEDULE = Cosine(STEPS, warmup=0.1)


def train(learner: spcl.Learner, steps: range) -> None:
    for step in steps:
        x = torch.randn(32, 2, generator=torch.Generator().manual_seed(step))
        learner.step({"side": (x, (x[:, 0] > 0).long()), "sum": (x, (x.sum(dim=1) > 0).long())})


torch.manual_seed(0)
sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
learner = spcl.Learner(nn.Linear(2, 8), spcl.SORO(), optimizer=sgd, schedule=SCHEDULE, clip_norm=0.5, average=0.95)
learner.add_task("side", classes=2)
learner.add_task("sum", classes=2)
train(learner, range(STEPS // 2))
with tempfile.TemporaryDirectory() as folder:
    learner.save(path := Path(folder) / "checkpoint")
    loaded = spcl.Learner.load(path, backbone=nn.Linear(2, 8), schedule=SCHEDULE)
for each in (learner, loaded):
    train(each, range(STEPS // 2, STEPS))
x = torch.randn(1000, 2)
print(f"sum: {learner.evaluate([(x, (x.sum(dim=1) > 0).long())], task='sum'):.1%} accuracy")
print(f"identical after loading: {torch.equal(learner.logits(x, 'sum'), loaded.logits(x, 'sum'))}")
