"""A live stream says what its sources answer, and lets sources that ended come back."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spcl.errors import SpclError, TaskError
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import SORO
from spcl.sources import FolderHub, HubSource, Publisher
from spcl.streams import LiveStream

LABELS = torch.arange(6) % 2


def readings(count: int, seed: int = 0, features: int = 3) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, features, generator=chance), LABELS) for _ in range(count)]


def new_learner() -> Learner:
    torch.manual_seed(0)
    return Learner(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), SORO(), memory=Reservoir(20))


def weights(learner: Learner) -> dict[str, Any]:
    return copy.deepcopy({name: each for name, each in learner.model_state().items() if name != "method"})


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_equal(each, its)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_sources_of_one_task_are_trained_through_their_encoders() -> None:
    phone = nn.Linear(5, 3)
    sources = {"watch-1": readings(4), "watch-2": readings(4, 1), "phone": readings(4, 2, features=5)}
    learner = new_learner()
    with LiveStream(
        sources,
        tasks=dict.fromkeys(sources, "activity"),
        classes={"activity": ["sit", "walk"]},
        encoders={"watch-1": "affine", "phone": phone},
        patience=10.0,
    ) as stream:
        stream.add("watch-3", readings(2, 3), task="activity", encoder="affine")
        learner.fit(stream)
        assert stream.tasks == dict.fromkeys([*sources, "watch-3"], "activity")
    assert list(learner.tasks) == ["activity"]
    assert sorted(learner.sources) == ["phone", "watch-1", "watch-2", "watch-3"]
    named = {name: source.encoder_name for name, source in learner.sources.items()}
    assert named == {"watch-1": "affine", "watch-2": None, "phone": None, "watch-3": "affine"}
    assert learner.sources["phone"].encoder is phone
    assert learner.active_sources == []


def test_sources_of_a_hub_announce_their_task_and_encoder(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    publisher = Publisher(hub)
    for name, encoder in (("watch-1", "affine"), ("watch-2", None)):
        publisher.start(name, classes=["sit", "walk"], task="activity", encoder=encoder)
        for x, y in readings(3):
            publisher.publish(name, x, y)
        publisher.end(name)
    learner = new_learner()
    sources = {name: HubSource(hub, name, "float32[3]") for name in ("watch-1", "watch-2")}
    with LiveStream(sources, patience=10.0) as stream:
        learner.fit(stream)
    assert learner.tasks["activity"].class_names == ("sit", "walk")
    assert {name: source.encoder_name for name, source in learner.sources.items()} == {
        "watch-1": "affine",
        "watch-2": None,
    }


def test_a_source_that_ended_starts_again() -> None:
    learner = new_learner()
    learner.add_task("activity", classes=2)
    options: dict[str, Any] = {"tasks": {"anna": "activity", "ben": "activity"}, "patience": 10.0}
    with LiveStream({"anna": readings(3), "ben": readings(2)}, **options) as stream:
        learner.fit(stream)
        assert sorted(stream.ended) == ["anna", "ben"]
        with pytest.raises(TaskError, match=r"again with restart\('anna', source\)"):
            stream.add("anna", readings(1))
        stream.restart("anna", readings(4, 1))
        assert stream.delivered == {"ben": 2}
        moments = list(stream)
    assert [name for moment in moments for name in moment.started] == ["anna"]
    assert [name for moment in moments for name in moment.ended] == ["anna"]
    assert stream.delivered == {"ben": 2, "anna": 4}
    assert sorted(stream.state_dict()["ended"]) == ["anna", "ben"]


def test_a_source_that_returns_before_anybody_was_told_of_its_end_goes_on() -> None:
    with LiveStream({"anna": readings(100)}, patience=10.0) as stream:
        assert next(iter(stream)).started == ("anna",)
        stream.remove("anna")
        stream.restart("anna", readings(1))
        later = list(stream)
    assert [moment.started for moment in later if moment.started] == []
    assert [name for moment in later for name in moment.ended] == ["anna"]
    assert stream.delivered == {"anna": 2}


def lives(folder: Path, stops: int) -> Learner:
    """Learn a source that ends and returns, stopped after every two moments."""
    hub, learner, state = FolderHub(folder / "hub"), new_learner(), None
    for _ in range(stops + 1):
        stream = LiveStream({"anna": HubSource(hub, "anna", "float32[3]")}, patience=0.5, together=True)
        with stream:
            if state is not None:
                learner = Learner.load(folder / "c", backbone=nn.Sequential(nn.Linear(3, 8), nn.ReLU()), stream=stream)
            if "anna" in stream.ended:
                stream.restart("anna", HubSource(hub, "anna", "float32[3]"))
            learner.fit(two_of(stream) if stops else stream)
            learner.save(folder / "c", stream=stream)
            if not stops:
                stream.restart("anna", HubSource(hub, "anna", "float32[3]"))
                learner.fit(stream)
            state = stream.state_dict()
    return learner


class two_of:  # noqa: N801 - a function that keeps what the stream has
    """The next two moments of a stream."""

    def __init__(self, stream: LiveStream) -> None:
        self.tasks, self.classes, self.encoders = stream.tasks, stream.classes, stream.encoders
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        for _, moment in zip(range(2), self._stream, strict=False):
            self.tasks, self.classes, self.encoders = self._stream.tasks, self._stream.classes, self._stream.encoders
            yield moment


def test_a_source_of_a_hub_reads_on_after_its_end_also_in_another_process(tmp_path: Path) -> None:
    for folder in ("whole", "stopped"):
        publisher = Publisher(FolderHub(tmp_path / folder / "hub"))
        for life in range(2):
            publisher.start("anna", classes=2, task="activity", encoder="affine")
            for x, y in readings(3, life):
                publisher.publish("anna", x, y)
            publisher.end("anna")
    whole, stopped = lives(tmp_path / "whole", 0), lives(tmp_path / "stopped", 5)
    assert whole.steps == stopped.steps == 6
    assert_equal(weights(whole)["backbone"], weights(stopped)["backbone"])
    assert_equal(weights(whole)["task_sources"], weights(stopped)["task_sources"])


def test_the_state_of_a_source_that_returned_is_resumed() -> None:
    with LiveStream({"anna": readings(3)}, epochs=2, patience=10.0) as stream:
        list(stream)
        stream.restart("anna", readings(3, 1))
        first = [next(iter(stream)) for _ in range(4)]
        state = stream.state_dict()
    assert state["ended"] == []
    with LiveStream({"anna": readings(3, 1)}, epochs=2, patience=10.0) as again:
        again.load_state_dict(state)
        rest = [moment for moment in again if moment.batches]
    assert [moment.started for moment in rest] == [(), ()]
    found = [moment.batches["anna"][0] for moment in [*first, *rest]]
    assert_equal(found, [x for x, _ in readings(3, 1)] * 2)


@pytest.mark.parametrize("argument", ["tasks", "classes", "encoders"])
def test_what_sources_answer_is_given_by_name(argument: str) -> None:
    with pytest.raises(SpclError, match=rf"{argument} is a list; give a dict by name"):
        LiveStream({}, **{argument: []})
