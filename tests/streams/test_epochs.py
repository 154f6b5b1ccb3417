"""Sources that are read several times, and training on them that is interrupted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from _learning import assert_same, batch, complete_state
from spcl.checkpoint import read_checkpoint
from spcl.errors import SpclError
from spcl.learner import Learner, StepReport
from spcl.memory import Reservoir
from spcl.methods import SORO
from spcl.sources import IterableSource
from spcl.streams import LiveStream


class PowerCutError(Exception):
    pass


def numbers(shuffle: bool = False) -> Any:
    data = TensorDataset(torch.arange(7.0)[:, None], torch.arange(7))
    return DataLoader(data, batch_size=2, shuffle=shuffle, generator=torch.Generator().manual_seed(5))


def read(stream: LiveStream) -> list[list[int]]:
    return [y.tolist() for moment in stream for _, y in moment.batches.values()]


def test_every_epoch_has_all_samples() -> None:
    with LiveStream({"a": numbers()}, epochs=3) as stream:
        moments = list(stream)
    assert [y.tolist() for moment in moments for _, y in moment.batches.values()] == 3 * [[0, 1], [2, 3], [4, 5], [6]]
    assert [moment.started for moment in moments if moment.started] == [("a",)]
    assert [moment.ended for moment in moments if moment.ended] == [("a",)]


def test_a_loader_shuffles_every_epoch_anew() -> None:
    with LiveStream({"a": numbers(shuffle=True)}, epochs=2) as stream:
        found = [each for batch_labels in read(stream) for each in batch_labels]
    assert sorted(found[:7]) == sorted(found[7:]) == list(range(7))
    assert found[:7] != found[7:]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cut", range(9))
def test_a_stream_reads_on_after_its_state(shuffle: bool, cut: int) -> None:
    with LiveStream({"a": numbers(shuffle)}, epochs=2) as stream:
        whole = read(stream)
    with LiveStream({"a": numbers(shuffle)}, epochs=2) as stream:
        moments = iter(stream)
        first = [next(moments).batches["a"][1].tolist() for _ in range(min(cut, 8))]
        state = stream.state_dict()
    with LiveStream({"a": numbers(shuffle)}, epochs=2) as stream:
        stream.load_state_dict(state)
        assert first + read(stream) == whole


def new_learner() -> Learner:
    torch.manual_seed(0)
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Tanh()), SORO(), memory=Reservoir(9))
    learner.add_task("a", classes=3)
    learner.add_task("b", classes=2)
    return learner


def new_stream() -> LiveStream:
    sources = {name: [batch(4, 2, seed) for seed in range(count)] for name, count in (("a", 3), ("b", 5))}
    return LiveStream(sources, epochs=3, together=True)


@pytest.mark.parametrize("cut", [0, 3, 8, 12])
def test_training_for_several_epochs_resumes_exactly(cut: int, tmp_path: Path) -> None:
    path, whole = tmp_path / "c", new_learner()
    whole.fit(new_stream(), checkpoint=tmp_path / "whole")

    def on_step(report: StepReport) -> None:
        if report.step == cut:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        new_learner().fit(new_stream(), checkpoint=path, every=0.0, on_step=on_step)
    stream = new_stream()
    if cut:
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Tanh())
        learner = Learner.load(path, backbone=backbone, stream=stream)
    else:
        learner = new_learner()
    learner.fit(stream, checkpoint=path)
    assert learner.steps == 15
    assert_same(complete_state(learner), complete_state(whole))
    ends = [read_checkpoint(each)["sources"]["stream"] for each in (path, tmp_path / "whole")]
    found, expected = ({**end, "step": None} for end in ends)  # the end of a source may come in a moment of its own
    assert found == expected


def generated() -> Iterator[Any]:
    yield batch(4, 2, 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (generated(), r"source 'a' is a generator, which cannot be read again, but epochs is 2; give a list"),
        (IterableSource([]), r"source 'a' is a IterableSource, whose messages are read once, but epochs is 2"),
        (DataLoader([1, 2], shuffle=True), r"shuffles without a generator, .* give it generator="),  # type: ignore[arg-type]
        (3, r"a source must be an iterable of batches, but it is a int"),
    ],
)
def test_sources_that_cannot_be_read_again_are_refused(source: Any, message: str) -> None:
    with pytest.raises(SpclError, match=message):
        LiveStream({"good": [], "a": source}, epochs=2)
    with LiveStream(epochs=2) as stream, pytest.raises(SpclError, match=message):
        stream.add("a", source)


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, None])
def test_the_number_of_epochs_is_checked(epochs: Any) -> None:
    with pytest.raises(SpclError, match=f"epochs is {epochs!r}; give a positive whole number"):
        LiveStream({}, epochs=epochs)
