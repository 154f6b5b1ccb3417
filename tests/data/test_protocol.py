import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spcl.data import ImageData
from spcl.data.protocol import (
    Configuration,
    Protocol,
    check_fit,
    draw_protocol,
    draw_timeline,
    fit,
    in_paradigm,
    load_protocol,
)
from spcl.errors import DataError, SpclError
from spcl.runs import resolve_settings
from spcl.runs.build import make_protocol
from spcl.streams import ParallelStream, Timeline, task_durations

PROTOCOLS = Path(__file__).resolve().parents[3] / "shared" / "protocols"
published = pytest.mark.skipif(not PROTOCOLS.is_dir(), reason=f"no published protocols in {PROTOCOLS}")


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Protocol, Tensor]:
    """A protocol, and the labels it was drawn for."""
    classes = draw(st.integers(1, 8))
    extra = draw(st.lists(st.integers(0, classes - 1), max_size=60))
    labels = torch.tensor([*range(classes), *extra])
    protocol = draw_protocol(
        classes,
        draw(st.integers(1, classes)),
        labels,
        batch_size=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 2**32)),
        overlap=draw(st.floats(0, 1)),
        gap=draw(st.integers(0, 5)),
    )
    return protocol, labels


def configurations(protocol: Protocol) -> list[Configuration]:
    return [protocol.configuration(index) for index in range(len(protocol))]


@settings(max_examples=50)
@given(drawn())
def test_drawn_configurations_satisfy_the_invariants(case: tuple[Protocol, Tensor]) -> None:
    protocol, labels = case
    assert len(protocol) == 9
    for index, configuration in enumerate(configurations(protocol)):
        assert configuration.index == index
        assert configuration.label_set == protocol.label_sets[index // 3]
        assert configuration.timeline == protocol.timelines[index // 3][index % 3]
        assert sorted(c for task in configuration.label_set for c in task) == list(range(protocol.classes))
        starts = [first for first, _ in configuration.timeline.spans]
        assert starts == sorted(starts)
        for paradigm in ("parallel", "joint", "serial"):
            check_fit(in_paradigm(configuration, paradigm), labels, protocol.batch_size)


@settings(max_examples=30)
@given(drawn(), st.integers(0, 8), st.sampled_from(["parallel", "joint", "serial"]))
def test_every_sample_is_seen_once(case: tuple[Protocol, Tensor], index: int, paradigm: Any) -> None:
    protocol, labels = case
    configuration = in_paradigm(protocol.configuration(index), paradigm)
    x = torch.arange(len(labels))
    stream = ParallelStream(x, labels, configuration.label_set, configuration.timeline, protocol.batch_size, seed=0)
    seen = torch.cat([x for moment in stream for x, _ in moment.batches.values()])
    assert sorted(seen.tolist()) == x.tolist()


@settings(max_examples=50)
@given(drawn(), st.data())
def test_fit_makes_a_timeline_fit(case: tuple[Protocol, Tensor], data: st.DataObject) -> None:
    protocol, labels = case
    counts = torch.bincount(labels, minlength=protocol.classes)
    repeats = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=len(counts), max_size=len(counts))))
    others = torch.repeat_interleave(torch.arange(protocol.classes), repeats)
    for configuration in configurations(protocol):
        assert fit(configuration, labels, protocol.batch_size) == configuration
        fitted = fit(configuration, others, protocol.batch_size)
        check_fit(fitted, others, protocol.batch_size)
        assert (fitted.label_set, fitted.index) == (configuration.label_set, configuration.index)


def test_protocol_depends_on_the_seed() -> None:
    labels = torch.arange(20).repeat(40)

    def draw(seed: int) -> Protocol:
        return draw_protocol(20, 4, labels, batch_size=8, seed=seed)

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert len(set(draw(5).label_sets)) == 3
    assert len(set(draw(5).timelines[0])) == 3


def test_classes_per_task_can_be_chosen() -> None:
    protocol = draw_protocol(6, (1, 2, 3), torch.arange(6), batch_size=1, seed=0)
    assert all([len(task) for task in label_set] == [1, 2, 3] for label_set in protocol.label_sets)


def test_equal_tasks_have_the_same_timelines_under_every_label_set() -> None:
    protocol = draw_protocol(6, 3, torch.arange(6).repeat(50), batch_size=4, seed=0)
    assert protocol.timelines[0] == protocol.timelines[1] == protocol.timelines[2]


def test_a_label_set_that_is_given_has_all_timelines() -> None:
    label_set, labels = ((3, 0), (1, 2)), torch.arange(4).repeat(100)
    protocol = draw_protocol(4, 2, labels, batch_size=10, seed=0, gap=3, label_set=label_set)
    assert protocol.label_sets == (label_set,)
    durations = task_durations(labels, label_set, 10)
    assert protocol.timelines == (tuple(draw_timeline(durations, index, seed=0, gap=3) for index in range(9)),)


def test_the_toy_benchmark_has_the_label_set_of_the_authors() -> None:
    labels = torch.arange(10).repeat(100)
    x = torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8)
    data = ImageData("toy-cifar10", x, labels, x[:10], labels[:10], tuple("abcdefghij"))
    chosen = resolve_settings({"benchmark": "toy-cifar10"})
    protocols = [make_protocol(chosen.model_copy(update={"protocol_seed": seed}), data) for seed in (0, 1)]
    for protocol in protocols:
        sets = {protocol.configuration(index).label_set for index in range(len(protocol))}
        assert sets == {((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))}
        timelines = [protocol.configuration(index).timeline for index in range(9)]
        assert len(set(timelines)) > 5
        assert all(timeline.durations == (16, 16) for timeline in timelines)
    assert protocols[0] != protocols[1]
    five = make_protocol(chosen.model_copy(update={"tasks": 5}), data)
    assert len(set(five.label_sets)) == 3


@settings(max_examples=30)
@given(drawn())
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, case: tuple[Protocol, Tensor]) -> None:
    protocol, _ = case
    path = tmp_path_factory.mktemp("protocol") / "own.json"
    protocol.save(path)
    assert load_protocol(path) == protocol


def test_unknown_configuration_and_paradigm_are_named() -> None:
    protocol = draw_protocol(4, 2, torch.arange(4), batch_size=1, seed=0)
    for index in (9, -1):
        with pytest.raises(SpclError, match=f"no configuration {index}; the protocol has 0 to 8"):
            protocol.configuration(index)
    with pytest.raises(SpclError, match="no paradigm 'sequential'; choose one of parallel, joint, serial"):
        in_paradigm(protocol.configuration(0), "sequential")  # type: ignore[arg-type]


def test_mismatched_timeline_is_reported_with_the_difference() -> None:
    configuration = Configuration(((0,), (1,)), Timeline(((0, 9), (5, 9))), index=0)
    labels = torch.tensor([0] * 20 + [1] * 14)
    with pytest.raises(DataError, match=r"task 1 has 5 steps and needs 7 \(2 too few\).*fit the timeline to the data"):
        check_fit(configuration, labels, batch_size=2)
    check_fit(fit(configuration, labels, batch_size=2), labels, batch_size=2)


def content() -> dict[str, Any]:
    entry = {"label_set": [[0, 2], [1]], "timelines": [[[0, 3], [2, 5]], [[0, 3], [1, 4]]]}
    return {"benchmark": "tiny", "batch_size": 4, "classes": 3, "label_sets": [entry, json.loads(json.dumps(entry))]}


def spoil(*path: str | int, value: Any) -> dict[str, Any]:
    spoilt = content()
    place: Any = spoilt
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return spoilt


def test_protocol_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(content()))
    protocol = load_protocol(path)
    assert len(protocol) == 4
    assert protocol.configuration(3) == Configuration(((0, 2), (1,)), Timeline(((0, 3), (1, 4))), 3)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (spoil("batch_size", value=0), "batch_size: Input should be greater"),
        (spoil("batch_size", value="128"), "batch_size: Input should be a valid integer"),
        (spoil("epochs", value=3), "epochs: Extra inputs are not permitted"),
        (spoil("classes", value=4), "label set 0: class 3 is in the label set 0 times"),
        (spoil("classes", value=2), "label set 0: task 0 of the label set has class 2"),
        (spoil("label_sets", value=[]), "label_sets: Tuple should have at least 1 item"),
        (spoil("label_sets", 1, "label_set", 1, value=[2]), "label set 1: class 1 is in the label set 0 times"),
        (spoil("label_sets", 1, "label_set", 1, value=[]), "label set 1: task 1 of the label set has no class"),
        (
            spoil("label_sets", 1, "label_set", 1, value=[1.5]),
            "label_sets.1.label_set.1.0: Input should be a valid int",
        ),
        (
            spoil("label_sets", 1, "timelines", 0, 1, value=[5, 4]),
            r"label set 1, timeline 0: task 1 has the span \(5, 4\)",
        ),
        (spoil("label_sets", 1, "timelines", 0, 1, value=[5]), "label_sets.1.timelines.0.1.1: Field required"),
        (spoil("label_sets", 0, "timelines", 1, value=[[0, 3]]), "label set 0 has 2 tasks, its timeline 1 has 1"),
        (spoil("label_sets", 0, "timelines", value=[[[0, 3], [2, 5]]]), r"2 label sets with \[1, 2\] timelines"),
    ],
)
def test_invalid_protocol_file_is_named_with_the_reason(tmp_path: Path, spoilt: dict[str, Any], message: str) -> None:
    path = tmp_path / "spoilt.json"
    path.write_text(json.dumps(spoilt))
    with pytest.raises(DataError, match=f"spoilt.json.*{message}"):
        load_protocol(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff", '{"benchmark": "x"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"foreign\.json"):
        load_protocol(path)
    with pytest.raises(DataError, match="cannot read the protocol"):
        load_protocol(tmp_path)


@published
@pytest.mark.parametrize(("name", "tasks"), [("ps-emnist", 5), ("ps-cifar100", 10), ("ps-tiny-imagenet", 10)])
def test_published_protocols_load_and_round_trip(tmp_path: Path, name: str, tasks: int) -> None:
    protocol = load_protocol(PROTOCOLS / f"{name}.json")
    assert (protocol.benchmark, len(protocol)) == (name, 9)
    assert all(len(configuration.label_set) == tasks for configuration in configurations(protocol))
    protocol.save(tmp_path / "copy.json")
    assert json.loads((tmp_path / "copy.json").read_text()) == json.loads((PROTOCOLS / f"{name}.json").read_text())


@published
@pytest.mark.parametrize("name", ["ps-cifar100", "ps-tiny-imagenet"])
def test_published_timelines_fit_complete_data(name: str) -> None:
    protocol = load_protocol(PROTOCOLS / f"{name}.json")
    labels = torch.arange(protocol.classes).repeat(500)
    for configuration in configurations(protocol):
        check_fit(configuration, labels, protocol.batch_size)


@published
def test_emnist_timelines_fit_a_subset_after_rescaling() -> None:
    protocol = load_protocol(PROTOCOLS / "ps-emnist.json")
    labels = torch.arange(62).repeat(1800)
    for configuration in configurations(protocol):
        with pytest.raises(DataError, match="too many"):
            check_fit(configuration, labels, protocol.batch_size)
        fitted = fit(configuration, labels, protocol.batch_size)
        assert fitted.timeline.durations == task_durations(labels, configuration.label_set, protocol.batch_size)
