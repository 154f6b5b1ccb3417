import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import spcl._util.registry
import spcl.paper.figures  # ours, which are otherwise loaded when a figure is asked for
from small_benchmark import write_benchmark
from spcl.grids import WorkerPool

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")

STATE = ("_factories", "_others")
"""The attributes in which registries hold what plug-ins add."""

spcl._util.registry.load_installed()  # our own plug-in belongs to the package; tests forget other plug-ins

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels then run on the CPU

torch.set_num_threads(1)  # the tensors of a test are too small for more


@pytest.fixture(scope="session")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that is learnt in seconds."""
    return write_benchmark(tmp_path_factory.mktemp("data") / "clusters.npz")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes that all tests share."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 the type of new tensors."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _no_plugins_of_other_tests() -> Iterator[None]:
    """Forget the plug-ins that a test loads, so that the next one sees the package's own things only."""
    registries = [listener.__self__ for listener in spcl._util.registry._listeners]
    before = [{name: dict(value) for name, value in vars(each).items() if name in STATE} for each in registries]
    yield
    for each, state in zip(registries, before, strict=True):
        vars(each).update(state)
    for name in [name for name in sys.modules if name.startswith("spcl_plugin_")]:
        del sys.modules[name]
