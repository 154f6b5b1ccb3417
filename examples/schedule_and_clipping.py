"""A learning-rate schedule and gradient clipping, and how both continue from a checkpoint.

    python examples/schedule_and_clipping.py

The learner's optimiser is an ordinary one of PyTorch: schedules take `learner.optimizer`, and a hook before its step
sees the combined update in the parameters' gradients, where it can be clipped. On a GPU a hook keeps the optimiser's
step, not the rest, from being captured in a CUDA graph.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from spcl.checkpoint import read_checkpoint
from spcl.learner import Learner
from spcl.methods import SORO

STEPS, LARGEST_NORM = 200, 0.5


def clip(optimizer: Optimizer, *_: object) -> None:
    clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], LARGEST_NORM)


def prepared(learner: Learner) -> CosineAnnealingLR:
    learner.optimizer.register_step_pre_hook(clip)
    return CosineAnnealingLR(learner.optimizer, STEPS)


def train(learner: Learner, schedule: CosineAnnealingLR, steps: range) -> None:
    for step in steps:
        x = torch.randn(32, 2, generator=torch.Generator().manual_seed(step))
        learner.step({"side": (x, (x[:, 0] > 0).long()), "sum": (x, (x.sum(dim=1) > 0).long())})
        schedule.step()


torch.manual_seed(0)
learner = Learner(nn.Linear(2, 8), SORO(), optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9))
learner.add_task("side", classes=2)
learner.add_task("sum", classes=2)
schedule = prepared(learner)
train(learner, schedule, range(STEPS // 2))
with tempfile.TemporaryDirectory() as folder:
    learner.save(path := Path(folder) / "checkpoint", schedule=schedule)
    loaded = Learner.load(path, backbone=nn.Linear(2, 8))
    again = prepared(loaded)  # a schedule needs the loaded learner's optimiser, so its state follows
    again.load_state_dict(read_checkpoint(path)["sources"]["schedule"])
for each, its_schedule in ((learner, schedule), (loaded, again)):
    train(each, its_schedule, range(STEPS // 2, STEPS))
x = torch.randn(1000, 2)
print(f"sum: {learner.evaluate([(x, (x.sum(dim=1) > 0).long())], task='sum'):.1%} accuracy")
print(f"identical after loading: {torch.equal(learner.logits(x, 'sum'), loaded.logits(x, 'sum'))}")
