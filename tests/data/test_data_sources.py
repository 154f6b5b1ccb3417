"""Data of several sources: what is accepted, how it is split, and what is said of what is not accepted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_files import write_pets
from spcl.data import (
    DATA,
    ImageData,
    SourceData,
    SourceSamples,
    from_arrays,
    from_npz,
    from_sources,
    hold_out,
    preset_for,
)
from spcl.errors import DataError, SpclError
from spcl.runs import execute, load_benchmark, resolve_settings
from spcl.runs.build import make_backbone
from spcl.runs.records import fingerprint

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(40, 5))
TOKENS = RNG.integers(1, 30, size=(40, 7))


def car() -> SourceData:
    """Three sources of one shape: speed (regression), signs (multi-label) and light (classes)."""
    return from_sources(
        {
            "speed": (FEATURES, FEATURES[:, 0]),
            "signs": (FEATURES, (FEATURES[:, :3] > 0).astype(int)),
            "light": (FEATURES, np.where(FEATURES[:, 1] > 0, "red", "green")),
        },
        name="car",
    )


def test_kinds_follow_from_the_targets() -> None:
    speed, signs, light = car().sources
    assert (speed.kind, speed.outputs, speed.classes) == ("regression", 1, None)
    assert (signs.kind, signs.outputs, signs.classes) == ("multilabel", 3, None)
    assert (light.kind, light.outputs, light.class_names) == ("classification", 2, ("green", "red"))
    assert speed.train_y.shape == (32, 1)
    assert speed.train_y.dtype == signs.train_y.dtype == torch.float32


def test_held_out_samples_are_a_fraction_of_every_source_and_class() -> None:
    data = car()
    for source in data.sources:
        both = torch.cat([source.train_x, source.test_x])  # type: ignore[list-item]
        assert torch.equal(both.sort(dim=0).values, torch.from_numpy(FEATURES).float().sort(dim=0).values)
    speed, _, light = data.sources
    assert len(speed.test_y) == 8
    assert torch.equal(speed.test_x[:, :1], speed.test_y)  # type: ignore[call-overload, index]
    counts = [torch.bincount(light.train_y).tolist(), torch.bincount(light.test_y).tolist()]
    assert [round((train + test) / 5) for train, test in zip(*counts, strict=True)] == counts[1]


def test_given_test_samples_are_used() -> None:
    data = from_sources({"a": (FEATURES, ["x", "y"] * 20, FEATURES[:3], ["y", "x", "y"])})
    assert data.sources[0].test_y.tolist() == [1, 0, 1]


def test_texts_images_and_several_parts() -> None:
    masked = {"input_ids": TOKENS, "attention_mask": (TOKENS > 5).astype(np.int64)}
    images = RNG.integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
    data = from_sources(
        {
            "text": (masked, TOKENS[:, 0] % 2),
            "pictures": (images, FEATURES[:, :2]),
            "pair": ((FEATURES, images), [0, 1] * 20),
        }
    )
    text, pictures, pair = data.sources
    assert isinstance(text.train_x, dict)
    assert torch.equal(text.train_x["attention_mask"], (text.train_x["input_ids"] > 5).long())
    assert pictures.outputs == 2
    assert isinstance(pair.train_x, tuple)
    assert [part.shape for part in pair.train_x] == [(32, 5), (32, 3, 8, 8)]
    assert data.shape == ()
    assert car().shape == (5,)


def test_soft_labels_train_and_are_tested_as_labels() -> None:
    soft = torch.softmax(torch.from_numpy(FEATURES[:, :3]), dim=1)
    (source,) = from_sources({"a": (FEATURES, soft)}, {"a": "classification"}).sources
    assert source.train_y.shape == (32, 3)
    assert source.test_y.dtype == torch.int64
    largest = torch.from_numpy(FEATURES[:, :3]).argmax(dim=1)
    assert torch.bincount(torch.cat([source.train_y.argmax(dim=1), source.test_y])).tolist() == (
        torch.bincount(largest).tolist()
    )


def test_token_sequences_can_be_split_into_tasks(tmp_path: Path) -> None:
    data = from_arrays(TOKENS, TOKENS[:, 0] % 4)
    assert data.train_x.dtype == torch.int64
    assert data.shape == (7,)
    np.savez(tmp_path / "texts.npz", x=TOKENS.astype(np.int32), y=TOKENS[:, 0] % 4)
    assert from_npz(tmp_path / "texts.npz").train_x.dtype == torch.int32


GOOD: dict[str, Any] = {
    "name": "a",
    "kind": "regression",
    "train_x": torch.zeros(4, 3),
    "train_y": torch.arange(4.0),
    "test_x": torch.zeros(2, 3),
    "test_y": torch.arange(2.0),
}
LABELS = {"kind": "classification", "train_y": torch.tensor([0, 1, 0, 1]), "test_y": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "ranking"}, "no kind 'ranking'; choose one of classification, regression, multilabel"),
        (LABELS, "needs the names of its classes"),
        (LABELS | {"class_names": ("one",)}, "labels must be 0..0, found 1"),
        (LABELS | {"class_names": ("a", "b"), "test_y": torch.zeros(2, 2)}, "vector of int64"),
        (LABELS | {"class_names": ("a", "b"), "train_y": torch.full((4, 2), 0.6)}, "add up to 1"),
        (
            LABELS | {"class_names": ("a", "b"), "train_y": torch.full((4, 4), 0.25)},
            r"probabilities of shape \(samples, 2\), but they are .* \(4, 4\)",
        ),
        ({"train_y": torch.arange(3.0)}, "4 samples but 3 targets"),
        ({"train_y": torch.arange(4)}, "regression must be floating-point numbers .* they are torch.int64"),
        ({"train_y": torch.tensor([0.0, 1.0, float("nan"), 0.0])}, "NaN or infinite"),
        ({"train_y": torch.zeros(4, 2)}, "2 outputs in training, but 1 in the test"),
        ({"class_names": ("a", "b")}, "1 outputs, but 2 names"),
        ({"kind": "multilabel"}, r"multilabel must be N×outputs, found .* \(4,\)"),
        ({"kind": "multilabel", "train_y": torch.full((4, 2), 0.5)}, "targets of a multilabel task hold 0.5"),
        ({"train_x": torch.zeros(4)}, "samples must be"),
        ({"train_x": [1.0]}, "a tensor, or a dict or tuple of tensors, found list"),
        ({"train_x": {"a": torch.zeros(4, 1), "b": torch.zeros(3, 1)}}, r"have \[4, 3\] entries"),
        ({"train_x": (torch.zeros(0, 1),)}, "no samples"),
        ({"test_x": torch.zeros(2, 4)}, "training samples are float32 3, test samples float32 4"),
        ({"test_x": {"a": torch.zeros(2, 3)}}, "test samples a float32 3"),
    ],
)
def test_invalid_sources_are_refused(change: dict[str, Any], message: str) -> None:
    SourceSamples(**GOOD)
    with pytest.raises(DataError, match=message):
        SourceSamples(**GOOD | change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SourceData("none", ()), "there is no source"),
        (lambda: SourceData("two", (SourceSamples(**GOOD), SourceSamples(**GOOD))), "2 sources are named 'a'"),
        (lambda: from_sources({"a": (FEATURES,)}), r"source 'a' must be \(x, y\) or"),
        (lambda: from_sources({"a": (FEATURES, FEATURES[:, 0])}, {"b": "regression"}), "a kind is given for 'b'"),
        (lambda: from_sources({"a": (FEATURES, FEATURES[:3, 0])}), "40 samples but 3 targets"),
        (lambda: from_sources({"a": (FEATURES, ["x"] * 39 + ["y"])}), "class y has one sample"),
        (lambda: from_sources({"a": (FEATURES, FEATURES[:, 0])}, test_fraction=2.0), "test_fraction is 2.0"),
        (lambda: from_sources({"a": (FEATURES, ["x"] * 40, FEATURES, ["y"] * 40)}), "without training samples: y"),
        (lambda: from_sources({"a": (FEATURES, np.full((40, 2), "x"))}), "array of numbers, found <U1"),
        (lambda: from_sources({"a": (FEATURES, FEATURES[:, 0])}, seed="x"), "seed is 'x'; give a whole number"),
        (lambda: from_sources({"a": (FEATURES, [[1], [2, 3]])}), "rows of different lengths"),
        (lambda: from_sources({"a": (FEATURES, FEATURES[:, 0])}, {"a": "classification"}), "labels hold fractions"),
    ],
)
def test_invalid_arguments_are_refused(make: Callable[[], SourceData], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_validation_is_held_out_of_every_source() -> None:
    data = car()
    held = hold_out(data, 0.25)
    for source, before in zip(held.sources, data.sources, strict=True):
        assert len(source.test_y) == 8
        assert len(source.train_y) == 24
        joined = torch.cat([source.train_x, source.test_x])  # type: ignore[list-item]
        assert torch.equal(joined.sort(dim=0).values, before.train_x.sort(dim=0).values)  # type: ignore[union-attr]
    with pytest.raises(SpclError, match="leaves nothing to validate on"):
        hold_out(data, 0.001)


def test_the_fingerprint_covers_every_part_of_every_source() -> None:
    masked = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    data = from_sources({"text": (masked, TOKENS[:, 0] % 2), "speed": (FEATURES, FEATURES[:, 0])})
    text, speed = data.sources
    assert isinstance(text.train_x, dict)

    def altered(tensor: Tensor) -> Tensor:
        return torch.cat([1 - tensor[:1], tensor[1:]])

    mask = altered(text.train_x["attention_mask"])
    others = [
        SourceData(data.name, (replace(text, train_x={**text.train_x, "attention_mask": mask}), speed)),
        SourceData(data.name, (text, replace(speed, test_y=altered(speed.test_y)))),
        SourceData(data.name, (text, replace(speed, name="pace"))),
        SourceData(data.name, (speed, text)),
    ]
    assert fingerprint(data) == fingerprint(SourceData(data.name, (text, speed)))
    assert len({fingerprint(data), *map(fingerprint, others)}) == 5


def test_presets_fit_the_kinds_of_samples() -> None:
    preset = preset_for("car", car())
    assert (preset.tasks, preset.batch_size, preset.backbone, preset.memory_budget) == (3, 4, "mlp", 50 + 50 + 20)
    assert preset_for("text", from_arrays(TOKENS, TOKENS[:, 0] % 4)).backbone == "text"
    masked = from_sources({"text": ({"input_ids": TOKENS}, TOKENS[:, 0] % 4)})
    assert preset_for("text", masked).backbone == "text"


# -- sources that share a task


def wearer(name: str, **fields: Any) -> SourceSamples:
    x, y = torch.rand(6, 3), torch.arange(6) % 2
    return SourceSamples(name, "classification", x, y, x[:2], y[:2], ("still", "moving"), **fields)


def station(name: str, **fields: Any) -> SourceSamples:
    x, y = torch.rand(6, 3), torch.rand(6)
    return SourceSamples(name, "regression", x, y, x[:2], y[:2], **fields)


def test_sources_of_one_task_are_counted_as_one_set_of_classes() -> None:
    data = SourceData("watches", (wearer("a", task="activity"), wearer("b", task="activity", unseen=True), wearer("c")))
    assert data.classes == 4
    assert [source.task_name for source in data.sources] == ["activity", "activity", "c"]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ((wearer("a", task="x"), station("b", task="x")), "'a' and 'b' answer the task 'x', but differ in"),
        ((station("a", task="x", scale=2.0), station("b", task="x")), "'a' and 'b' answer the task 'x', but differ in"),
        ((wearer("a"), wearer("b", task="a", unseen=False), wearer("c", unseen=True)), "task 'c' are unseen"),
    ],
    ids=["kinds", "scales", "unseen"],
)
def test_sources_that_cannot_share_a_task_are_refused(sources: tuple[SourceSamples, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SourceData("watches", sources)


PERSONS = {
    "anna": (FEATURES, ["sit", "walk"] * 20),
    "ben": (FEATURES + 1.0, ["walk", "run"] * 20),
    "eve": (FEATURES - 1.0, ["run", "sit"] * 20),
}
ACTIVITY = dict.fromkeys(PERSONS, "activity")


def test_sources_of_one_task_have_the_classes_of_all_of_them() -> None:
    anna, ben, eve = from_sources(PERSONS, tasks=ACTIVITY, unseen=["eve"]).sources
    assert anna.class_names == ben.class_names == eve.class_names == ("run", "sit", "walk")
    assert (anna.task, anna.unseen, eve.task, eve.unseen) == ("activity", False, "activity", True)
    assert anna.train_y.unique().tolist() == [1, 2]
    assert ben.test_y.unique().tolist() == [0, 2]
    assert eve.test_y.unique().tolist() == [0, 1]
    alone = from_sources(PERSONS).sources[0]
    assert torch.equal(alone.train_y, anna.train_y - 1)
    assert torch.equal(alone.train_x, anna.train_x)  # type: ignore[arg-type]


def test_sources_with_and_without_a_shared_task_keep_their_order() -> None:
    data = from_sources({"car": (FEATURES, FEATURES[:, 0]), **PERSONS}, tasks={"ben": "activity", "eve": "activity"})
    assert [(each.name, each.task_name) for each in data.sources] == [
        ("car", "car"),
        ("anna", "anna"),
        ("ben", "activity"),
        ("eve", "activity"),
    ]


def test_a_kind_may_be_given_for_a_task() -> None:
    numbers = {name: (FEATURES, np.arange(40.0) % 4) for name in ("north", "south")}
    data = from_sources(numbers, {"forecast": "regression"}, tasks=dict.fromkeys(numbers, "forecast"))
    assert [source.kind for source in data.sources] == ["regression", "regression"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["activity"]}, "tasks are a list; give a dict by the names"),
        ({"tasks": {"adam": "activity"}}, "a task is given for 'adam', which is none of 'anna', 'ben', 'eve'"),
        ({"tasks": {"anna": 3}}, "the task of source 'anna' is 3; give the name of a task"),
        ({"tasks": {"anna": ""}}, "the task of source 'anna' is ''; give the name of a task"),
        ({"tasks": ACTIVITY, "unseen": "eve"}, "unseen is 'eve'; give a list"),
        ({"tasks": ACTIVITY, "unseen": ["adam"]}, "unseen names 'adam', which is none of 'anna', 'ben', 'eve'"),
        ({"unseen": ["eve"]}, "all sources of the task 'eve' are unseen; train at least one"),
        ({"tasks": ACTIVITY, "unseen": ["anna", "eve"]}, "activity: test labels without training samples: sit"),
        ({"tasks": ACTIVITY, "kinds": {"anna": "multilabel"}}, "array of numbers"),
    ],
)
def test_wrong_tasks_of_sources_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_sources(PERSONS, **options)


def test_labels_and_probabilities_of_one_task_are_refused() -> None:
    soft = torch.softmax(torch.from_numpy(FEATURES[:, :2]), dim=1)
    given = {"a": (FEATURES, soft), "b": (FEATURES, [0, 1] * 20)}
    with pytest.raises(DataError, match="t: some sources have probabilities, others labels"):
        from_sources(given, {"t": "classification"}, tasks={"a": "t", "b": "t"})


def test_sources_in_an_npz_file_say_which_task_they_answer(tmp_path: Path) -> None:
    arrays = {f"{name}_{part}": each for name, pair in PERSONS.items() for part, each in zip("xy", pair, strict=True)}
    arrays |= {f"{name}_task": "activity" for name in PERSONS}
    np.savez(path := tmp_path / "watches.npz", **arrays, eve_unseen=True)
    expected = from_sources(PERSONS, tasks=ACTIVITY, unseen=["eve"], name="watches")
    assert fingerprint(load_benchmark(str(path))) == fingerprint(expected)
    for wrong, message in (
        ({"anna_task": 3}, "anna_task is 3; give the name of a task as text"),
        ({"anna_task": ["a", "b"]}, "anna_task is a list; give the name of a task as text"),
        ({"eve_unseen": 1}, r"eve_unseen is a ndarray of shape \(\) of int64; give True or False"),
    ):
        np.savez(path, **{**arrays, **wrong})  # type: ignore[arg-type]
        with pytest.raises(DataError, match=message):
            load_benchmark(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": ""}, "has no name"),
        ({"scale": 0.0}, "a regression needs a number > 0"),
        ({"scale": float("nan")}, "a regression needs a number > 0"),
        ({"train_times": torch.arange(6)}, "together, or neither"),
        ({"train_times": torch.arange(5), "test_times": torch.arange(2)}, r"one for each of 6 samples, .*\(5,\)"),
        ({"train_times": torch.arange(6.0), "test_times": torch.arange(2)}, "must be a vector of int64"),
        ({"train_times": torch.arange(6).flip(0), "test_times": torch.arange(2)}, "train: times decrease"),
    ],
)
def test_wrong_fields_of_a_source_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        station("a", **fields)


def test_holding_out_keeps_times_beside_their_samples() -> None:
    x = torch.arange(20.0)[:, None]
    times = torch.arange(20) * 3
    source = SourceSamples("a", "regression", x, x, x, x, scale=5.0, train_times=times, test_times=times)
    held = hold_out(SourceData("air", (source,)), 0.25).sources[0]
    assert held.scale == 5.0
    assert held.test_times is not None
    assert held.train_times is not None
    for inputs, when in ((held.train_x, held.train_times), (held.test_x, held.test_times)):
        assert torch.equal(inputs[:, 0].long() * 3, when)
    assert len(held.test_times) == 5


def test_the_fingerprint_knows_tasks_and_unseen_sources() -> None:
    torch.manual_seed(0)
    one = wearer("a", task="activity")
    others = [replace(one, task=None), replace(one, task="other")]
    assert len({fingerprint(SourceData("watches", (each,))) for each in (one, *others)}) == 3


def test_a_network_standardises_by_the_training_samples_of_trained_sources() -> None:
    one, other, unseen = (torch.randn(20, 6, 3) * scale for scale in (1.0, 50.0, 1e6))
    y = torch.arange(20) % 2
    sources = [
        SourceSamples(name, "classification", x, y, x, y, ("a", "b"), task="t", unseen=name == "unseen")
        for name, x in (("one", one), ("other", other), ("unseen", unseen))
    ]
    data = SourceData("walks", tuple(sources))
    both = torch.cat([one, other]).flatten(0, 1)
    for backbone in ("conv1d", {"name": "mlp", "standardise": True}):
        settings = resolve_settings({"backbone": backbone}, data=data)
        network = make_backbone(settings, data, torch.device("cpu"))
        torch.testing.assert_close(network[0](both).std(dim=0), torch.ones(3))
        settings = resolve_settings({"backbone": backbone, "normalise": False}, data=data)
        assert torch.equal(make_backbone(settings, data, torch.device("cpu"))[0](both), both)


# -- loading by name


def test_data_sets_of_plug_ins_are_loaded_by_name_with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DATA, "_factories", {})

    @DATA.register("two-cars")
    def two_cars(data_dir: str | None, samples: int = 10) -> ImageData:
        assert data_dir == str(tmp_path)
        return from_arrays(FEATURES[:samples], [0, 1] * (samples // 2), name="two-cars")

    assert load_benchmark("two-cars", str(tmp_path), samples=20).train_samples == 16
    with pytest.raises(SpclError, match="data set 'two-cars' has no option 'size'"):
        load_benchmark("two-cars", str(tmp_path), size=3)
    with pytest.raises(DataError, match=r"unknown data set 'two-car', .*; did you mean 'two-cars'"):
        load_benchmark("two-car")


def test_size_and_mode_of_pictures_are_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    folder = write_pets(tmp_path / "pets", 3)
    assert load_benchmark(folder).shape == (3, 32, 32)
    assert load_benchmark(folder, size=12, mode="L").shape == (1, 12, 12)
    for options, message in (
        ({"width": 3}, "has no option 'width'; choose from size, mode"),
        ({"size": "12"}, "size is '12'"),
        ({"mode": "CMYK"}, "mode is 'CMYK'; choose one of L, RGB"),
    ):
        with pytest.raises(DataError, match=message):
            load_benchmark(folder, **options)


def test_data_without_options_refuses_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=FEATURES, y=[0, 1] * 20)
    for benchmark, hint in ((str(tmp_path / "own.npz"), "choose from kind"), ("ps-emnist", "leave it out")):
        with pytest.raises(DataError, match=f"has no option 'size'; {hint}"):
            load_benchmark(benchmark, size=3)


@pytest.mark.parametrize("column", [False, True])
def test_whole_numbers_stored_as_floats_need_a_kind(tmp_path: Path, column: bool) -> None:
    y = np.arange(40.0)[:, None] % 4 if column else np.arange(40.0) % 4
    np.savez(path := tmp_path / "labels.npz", x=FEATURES, y=y)
    with pytest.raises(
        DataError, match=r"whole numbers as float64 \(0, 1, 2, 3\), which may be classes .* the option kind"
    ):
        load_benchmark(str(path))
    for kind, classes in (("classification", 4), ("regression", 0)):
        assert load_benchmark(str(path), kind=kind).classes == classes
        assert load_benchmark(str(path), kind={"labels": kind}).classes == classes
        np.savez(path, x=FEATURES, y=y, kind=kind)
        assert load_benchmark(str(path)).classes == classes
    found = load_benchmark(str(path), kind="classification")
    assert isinstance(found, SourceData)
    assert found.sources[0].class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize("y", [np.arange(40.0), np.arange(40) / 8, np.zeros(40)])
def test_numbers_that_cannot_be_classes_are_a_regression(y: np.ndarray) -> None:
    assert from_sources({"a": (FEATURES, y)}).sources[0].kind == "regression"


LARGE = torch.arange(1e4).reshape(100, 100)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sources": [("a", LARGE, LARGE[0])]},
        {"sources": (LARGE, LARGE[0])},
        {"sources": LARGE},
        {"sources": {LARGE: (LARGE, LARGE[0])}},
        {"sources": {"a": {"x": LARGE, "y": LARGE[0]}}},
        {"sources": {"a": (LARGE, LARGE[0])}, "kinds": LARGE},
        {"sources": {"a": (LARGE, LARGE[0])}, "kinds": {"a": LARGE}},
        {"sources": {"a": (LARGE, LARGE[0])}, "kinds": {LARGE: "regression"}},
        {"sources": {"a": (LARGE, LARGE[0])}, "test_fraction": LARGE},
        {"sources": {"a": (LARGE, LARGE[0])}, "name": LARGE},
        {"sources": {"a": (LARGE, LARGE[0])}, "seed": LARGE},
    ],
)
def test_errors_name_shapes_instead_of_printing_tensors(arguments: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        from_sources(**arguments)
    assert len(str(error.value)) < 120
    assert "tensor(" not in str(error.value)


def walks(count: int, longest: int, tokens: bool = False) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    lengths = rng.integers(2, longest + 1, size=count)
    return [rng.integers(1, 9, size=n) if tokens else rng.normal(size=(n, 3)).astype(np.float32) for n in lengths]


def by_hand(series: list[np.ndarray], longest: int) -> np.ndarray:
    filled = np.zeros((len(series), longest, *series[0].shape[1:]), series[0].dtype)
    for row, each in zip(filled, series, strict=True):
        row[: len(each)] = each
    return filled


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_series_of_different_lengths_are_padded_to_the_longest(tokens: bool, make: Callable[[np.ndarray], Any]) -> None:
    given, tests = walks(30, 6, tokens), walks(8, 9, tokens)
    y, test_y = [0, 1] * 15, [0, 1] * 4
    x, test_x = [[make(each) for each in series] for series in (given, tests)]
    longest = max(map(len, given + tests))
    source = from_sources({"walk": (x, y, test_x, test_y)}).sources[0]
    for padded, series in ((source.train_x, given), (source.test_x, tests)):
        assert isinstance(padded, Tensor)
        np.testing.assert_array_equal(padded.numpy(), by_hand(series, longest))
    data = from_arrays(x, y, test_x, test_y)
    assert torch.equal(data.train_x, source.train_x)
    masks = [make(np.ones(len(each), np.float32)) for each in given]
    parts = from_sources({"walk": ({"x": x, "mask": masks}, y)}, test_fraction=0.5).sources[0].train_x
    assert isinstance(parts, dict)
    assert torch.equal(parts["mask"].bool(), parts["x"].reshape(*parts["mask"].shape, -1).ne(0).any(dim=2))


def test_series_in_an_npz_file_have_their_lengths(tmp_path: Path) -> None:
    given, others = walks(30, 6), walks(20, 4, tokens=True)
    arrays = {
        "walk_x": np.concatenate(given),
        "walk_lengths": list(map(len, given)),
        "walk_y": [0, 1] * 15,
        "text_x": np.concatenate(others),
        "text_lengths": list(map(len, others)),
        "text_y": [0, 1] * 10,
    }
    np.savez(path := tmp_path / "series.npz", **arrays)
    expected = from_sources({"walk": (given, [0, 1] * 15), "text": (others, [0, 1] * 10)}, name="series")
    assert fingerprint(load_benchmark(str(path))) == fingerprint(expected)
    single = {name.removeprefix("walk_"): array for name, array in arrays.items() if name.startswith("walk")}
    np.savez(
        path, **single, test_x=np.concatenate(given[:4]), test_lengths=list(map(len, given[:4])), test_y=[0, 1] * 2
    )
    found = load_benchmark(str(path))
    assert fingerprint(found) == fingerprint(from_arrays(given, [0, 1] * 15, given[:4], [0, 1] * 2, name="series"))
    for change, message in (
        ({"lengths": [3] * 30}, r"lengths add up to 90, but x has the shape"),
        ({"lengths": [0.5] * 30}, "lengths must be whole numbers"),
    ):
        np.savez(path, **single | change)
        with pytest.raises(DataError, match=message):
            load_benchmark(str(path))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([np.zeros((2, 3)), np.zeros((2, 4))], r"several shapes \(2×3, 2×4, …\)"),
        ([np.zeros((2, 3), np.uint8), np.zeros((4, 3), np.uint8)], "several shapes"),
        ([np.zeros(3), np.array(1.0)], "several shapes"),
    ],
)
def test_samples_that_are_no_series_must_have_one_shape(x: list[np.ndarray], message: str) -> None:
    for make in (lambda: from_sources({"a": (x * 9, [0, 1] * 9)}), lambda: from_arrays(x * 9, [0, 1] * 9)):
        with pytest.raises(DataError, match=message):
            make()


def test_a_run_learns_from_series_of_different_lengths(tmp_path: Path) -> None:
    series = [each + (3.0 if k % 2 else -3.0) for k, each in enumerate(walks(120, 9))]
    data = from_sources({"walk": (series, [0, 1] * 60)}, name="walks")
    settings = resolve_settings({"method": "er", "device": "cpu", "batch_size": 4, "threads": 1}, data=data)
    assert execute(settings, tmp_path / "run", data=data).accuracy > 80.0


def test_the_label_for_no_label_is_no_class() -> None:
    y = np.array([0, 1, -100, 0, 1, 1])
    with pytest.raises(DataError, match=r"1 of 6 labels are -100, which stands for no label; leave these samples out"):
        from_sources({"anna": (np.zeros((6, 2), dtype=np.float32), y)})
