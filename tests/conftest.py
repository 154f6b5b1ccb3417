from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from small_benchmark import write_benchmark
from spcl.grids import WorkerPool

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")

torch.set_num_threads(1)  # the tensors of a test are too small for more


@pytest.fixture(scope="session")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that is learnt in seconds."""
    return write_benchmark(tmp_path_factory.mktemp("data") / "clusters.npz")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Worker processes that the tests of a file share."""
    with WorkerPool(2) as pool:
        yield pool
