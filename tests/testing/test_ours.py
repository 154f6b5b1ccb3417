"""Everything that has a name passes the checks that plug-ins are told to pass."""

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from list_hub import ListHub
from redis_process import RedisProcess, needs_redis
from spcl.losses import LOSSES
from spcl.memory import MEMORIES
from spcl.methods import METHODS, make_method
from spcl.models import BACKBONES
from spcl.optimizers import OPTIMIZERS
from spcl.schedules import SCHEDULES
from spcl.sources import FolderHub, Hub, RedisHub
from spcl.testing import (
    check_backbone,
    check_hub,
    check_loss,
    check_memory,
    check_method,
    check_optimizer,
    check_schedule,
    check_transform,
)
from spcl.transforms import TRANSFORMS

RANDOM = {"graddrop", "pcgrad", "rlw"}

SCALING = {"normsum": -1, **dict.fromkeys(("emgd", "soro", "soro+dbt"))}
"""Methods whose weights are not the same at any common scale of the gradients."""

OPTIONS: dict[str, dict[str, Any]] = {
    "steps": {"at": [0.3, 0.6], "factor": 0.5},
    "cosine": {"warmup": 0.1, "final": 0.01},
    "linear": {"warmup": 0.2},
    "resnet18": {"width": 4},
    "resnet34": {"width": 4},
    "vit": {"width": 12, "depth": 1},
    "text": {"width": 8, "depth": 1},
    "ngrams": {"rows": 7, "width": 8},
    "conv1d": {"width": 8},
    "gru": {"width": 8},
}
"""Options that reach more of the code, or make a network small."""

GENERATOR = torch.Generator().manual_seed(0)
TOKENS, SERIES = torch.randint(1, 9, (8, 5), generator=GENERATOR), torch.randn(8, 11, 3, generator=GENERATOR)
SAMPLES = {"text": TOKENS, "ngrams": TOKENS, "conv1d": SERIES, "gru": SERIES}
"""What networks take that do not take images."""

KINDS = {"mse": "regression", "l1": "regression", "huber": "regression", "binary-cross-entropy": "multilabel"}


def ours(registry: Any) -> list[str]:
    """The names of a registry that are not of other tests."""
    return [name for name in registry if not name.endswith(":") and registry[name].__module__.startswith("spcl.")]


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str) -> None:
    check_method(partial(make_method, name), random=name in RANDOM, scaling=SCALING.get(name, 0))


@pytest.mark.parametrize("name", MEMORIES)
def test_memories(name: str) -> None:
    check_memory(MEMORIES[name], replays_running=MEMORIES[name].replays_running)


@pytest.mark.parametrize("name", ours(BACKBONES))
def test_backbones(name: str) -> None:
    check_backbone(partial(BACKBONES[name], **OPTIONS.get(name, {})), SAMPLES.get(name))


@pytest.mark.parametrize("name", ours(LOSSES))
def test_losses(name: str) -> None:
    check_loss(LOSSES[name], KINDS.get(name, "classification"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    check_schedule(partial(SCHEDULES[name], **OPTIONS.get(name, {})))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    check_transform(TRANSFORMS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    check_optimizer(OPTIMIZERS[name])


# -- hubs


def test_a_folder_is_a_hub(tmp_path: Path) -> None:
    numbers = count()

    def make() -> FolderHub:
        return FolderHub(tmp_path / str(next(numbers)))

    def lose(hub: Hub) -> None:
        assert isinstance(hub, FolderHub)
        for name in sorted(hub._tasks.glob("a/*.safetensors"))[3:]:
            name.unlink()

    check_hub(make, lose=lose)


def test_a_list_is_a_hub() -> None:
    check_hub(ListHub, concurrent=False)


@needs_redis
def test_redis_is_a_hub(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server, server.unused_at_the_end():
        numbers = count()

        check_hub(lambda: RedisHub(server.url, f"hub-{next(numbers)}"))
