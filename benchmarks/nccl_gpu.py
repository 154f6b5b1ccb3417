"""Ranks that talk by NCCL on the GPU of this machine, against one process without ranks.

Three parts, each by ``torchrun``: one rank with NCCL; two ranks with NCCL, which need a GPU each; two ranks that send
the GPU's tensors by gloo. Each trains a small network with SORO and memory for ten steps, split by tasks, by data, and
sharded, and shows how much weights and losses differ from those without ranks. Without a GPU all of them use gloo.

    python benchmarks/nccl_gpu.py
"""

import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from spcl.distributed import World
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import SORO

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NCCL = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
PARTS = {"one": (1, "a: one rank, NCCL"), "two": (2, "b: two ranks on one GPU, NCCL"), "gloo": (2, "c: two, gloo")}
TIMEOUT = timedelta(seconds=40)
PART_SECONDS = 140
TASKS, STEPS, BATCH, CLASSES = "abc", 10, 32, 4


def new_backbone() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 64)).to(DEVICE)


def trained(world: World | None, sharded: bool = False) -> list[Tensor]:
    """Return the weights after the steps, and all losses."""
    backbone, losses = new_backbone(), list[float]()
    if sharded and world is not None:
        fully_shard(backbone, mesh=world.mesh["data"])
    learner = Learner(backbone, SORO(), memory=Reservoir(40), distributed=world, capture=False)
    for name in TASKS:
        learner.add_task(name, classes=CLASSES)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batches = {
            name: (
                torch.randn(BATCH, 3, 16, 16, generator=generator),
                torch.randint(CLASSES, (BATCH,), generator=generator),
            )
            for name in TASKS
        }
        losses += learner.step(batches).losses.values()
    return [value.cpu() for value in learner.model_state()["backbone"].values()] + [torch.tensor(losses)]


def run_rank(part: str) -> None:
    """Make the trainings of one rank, and show how they differ from that of one process."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    dist.init_process_group("gloo" if part == "gloo" else NCCL, timeout=TIMEOUT)
    expected = trained(None)
    for split, sharded in [("tasks", False), ("data", False), *[("data", True)] * (part != "gloo")]:
        text = difference(split, sharded, expected)
        print(f"  rank {dist.get_rank()}, {split}{', sharded' * sharded}: {text}", flush=True)
        if "Error" in text:
            break
    os._exit(0)  # without waiting for others, which may have failed


def difference(split: str, sharded: bool, expected: list[Tensor]) -> str:
    try:
        pairs = zip(trained(World(split=split, timeout=TIMEOUT), sharded), expected, strict=True)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())[:500]
    largest = max(float((found - value).abs().max() / value.abs().max()) for found, value in pairs)
    return f"largest relative difference {largest:.2g}"


def main() -> None:
    print(f"torch {torch.__version__}, {DEVICE}, {torch.cuda.device_count()} GPU", flush=True)
    for port, (part, (size, title)) in enumerate(PARTS.items(), start=29611):
        launch = ["timeout", "-k", "10", str(PART_SECONDS), sys.executable, "-m", "torch.distributed.run"]
        where = [f"--nproc-per-node={size}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        done = subprocess.run([*launch, *where, __file__, part], capture_output=True, text=True, check=False)
        print(f"{title} (status {done.returncode})\n{done.stdout.rstrip() or done.stderr.strip()[-600:]}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1])
    else:
        main()
