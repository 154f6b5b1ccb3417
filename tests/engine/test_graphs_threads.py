"""Steps are captured as CUDA graphs while another thread predicts with a copy of the weights."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from spcl.learner import Learner
from spcl.learner.prediction import Predictor
from spcl.memory import Reservoir
from spcl.methods import SORO

STEPS = 10
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")


@contextmanager
def predictions(predictor: Predictor) -> Iterator[None]:
    """A thread that predicts until the end, from before the first step."""
    begun, stop, errors = threading.Event(), threading.Event(), []

    def predict() -> None:
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(3))
        try:
            expected = predictor.predict_proba(x, "a").cpu()
            while not stop.is_set():
                torch.testing.assert_close(predictor.predict_proba(x, "a").cpu(), expected)
                begun.set()
        except BaseException as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        assert begun.wait(60.0)
        yield
    finally:
        stop.set()
        thread.join(60.0)
    assert errors == []


def train(device: str, predicting: bool) -> list[dict[str, float]]:
    """Return the losses of steps on one task and then on two, so that graphs are captured again."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(12, 16), nn.ReLU()).to(device)
    learner = Learner(backbone, SORO(), memory=Reservoir(20, seed=1), memory_batch=8, capture=device == "cuda")
    draws = torch.Generator().manual_seed(2)

    def step(*tasks: str) -> dict[str, float]:
        batches = {task: (torch.randn(8, 12, generator=draws), torch.arange(8) % 3) for task in tasks}
        return dict(learner.step(batches).losses)

    learner.add_task("a", classes=3)
    losses = [step("a")]
    with predictions(learner.snapshot()) if predicting else nullcontext():
        losses += [step("a") for _ in range(STEPS)]
        learner.add_task("b", classes=3)
        losses += [step("a", "b") for _ in range(STEPS)]
    if device == "cuda":
        assert learner._engine._capture.unsupported is None  # type: ignore[attr-defined]
    return losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_predictions_of_another_thread_do_not_disturb_steps(device: str) -> None:
    disturbed, alone = train(device, predicting=True), train(device, predicting=False)
    for mine, theirs in zip(disturbed, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
