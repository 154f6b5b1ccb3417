"""WISDM, Beijing's air and CLINC150: files in the publishers' formats, with gaps, repetitions and broken lines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_files import (
    air_files,
    air_line,
    air_lines,
    arff,
    clinc_files,
    raw_samples,
    wisdm_files,
    write_files,
    write_zip,
)
from spcl.data import SourceData, load_beijing_air, load_clinc150, load_wisdm
from spcl.errors import DataError
from spcl.runs import load_benchmark

PERSONS = {1600: "AAAABBBB", 1601: "AAAAAAAA", 1603: "BBBBBBAAAA", 1607: "AABB"}
WATCH, RAW = "arff_files/watch/accel/data_{0}_accel_watch.arff", "raw/watch/accel/data_{0}_accel_watch.txt"


@pytest.fixture(autouse=True)
def _no_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)


# -- WISDM


def wisdm(folder: Path, files: dict[str, bytes], **options: Any) -> SourceData:
    write_files(folder / "wisdm-dataset", files)
    return load_wisdm(data_dir=folder, **options)


def test_a_recording_is_a_source_of_one_shared_task(tmp_path: Path) -> None:
    data = wisdm(tmp_path, wisdm_files(PERSONS), unseen=0.0)
    assert [source.name for source in data.sources] == [f"watch-accel-{person}" for person in PERSONS]
    assert {source.task for source in data.sources} == {"activity"}
    assert {source.class_names for source in data.sources} == {("walking", "jogging")}
    first = data.sources[0]
    assert first.train_x.shape == (6, 4)
    assert first.train_x[:, 0].tolist() == [1000, 1001, 1002, 1004, 1005, 1006]
    assert first.test_x[:, 0].tolist() == [1003, 1007], "the last quarter of every activity"
    assert (first.train_y.tolist(), first.test_y.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])


def test_unseen_persons_are_drawn_from_the_seed_for_all_devices(tmp_path: Path) -> None:
    files = wisdm_files(PERSONS) | wisdm_files(PERSONS, "phone", "gyro")
    drawn = set()
    for seed in range(8):
        data = wisdm(tmp_path, files, devices=["watch", "phone"], sensors=["accel", "gyro"], unseen=0.5, seed=seed)
        unseen = [source.name.rsplit("-", 1) for source in data.sources if source.unseen]
        persons = frozenset(person for _, person in unseen)
        assert len(persons) == 2
        assert len(unseen) == 4
        drawn.add(persons)
    assert len(drawn) > 1
    again = [load_wisdm(data_dir=tmp_path, unseen=0.5, seed=3).sources for _ in range(2)]
    assert [source.unseen for source in again[0]] == [source.unseen for source in again[1]]


def test_published_repetitions_and_repeated_windows_are_left_out(tmp_path: Path) -> None:
    files = wisdm_files({1610: "AAAA", 1611: "AAAA", 1617: "AAAA", 1618: "AAAA"}, "phone")
    files["arff_files/phone/accel/data_1618_accel_phone.arff"] = arff(1618, "AAAAAA", first=11_000.0).encode()
    twice = arff(1600, "AAAA").replace("@data\n", "@data\nA,1,-1.5e-3,0,0.125,1600\n")
    files[WATCH.format(1600)] = twice.encode()
    data = wisdm(tmp_path, files, devices=["phone", "watch"], unseen=0.0)
    assert {source.name: len(source.train_y) + len(source.test_y) for source in data.sources} == {
        "phone-accel-1610": 4,
        "phone-accel-1618": 2,
        "watch-accel-1600": 4,
    }


def test_persons_without_enough_windows_are_left_out(tmp_path: Path) -> None:
    data = wisdm(tmp_path, wisdm_files({1600: "AABB", 1601: "", 1602: "AB"}), unseen=0.0)
    assert [source.name for source in data.sources] == ["watch-accel-1600"]


def test_wisdm_is_read_from_the_publishers_archive(tmp_path: Path) -> None:
    write_zip(tmp_path / "wisdm-dataset.zip", "wisdm-dataset", wisdm_files(PERSONS) | {"activity_key.txt": b"A = walk"})
    assert len(load_wisdm(data_dir=tmp_path).sources) == 4
    found = load_benchmark("wisdm", str(tmp_path), unseen=0.25)
    assert isinstance(found, SourceData)
    assert sum(source.unseen for source in found.sources) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (arff(1600, "AB").replace("A,0.0,", "A,abc,"), r"1600_accel_watch.arff, line 11: expected numbers .*abc"),
        (arff(1600, "AB").replace("A,0.0,", "A,"), r"line 11: expected an activity, 4 features and a person, found 5"),
        (
            arff(1600, "AB").replace("B,1.0", "N,1.0"),
            r"line 12: expected an activity from A to S, without N, found 'N'",
        ),
        (arff(1600, "AB").replace("A,0.0,", "A,nan,"), r"line 11: expected finite numbers"),
        (arff(1600, "AB").replace("A,0.0,", "A,?,"), r"line 11: expected numbers"),
        (arff(1600, "AB").replace("@data", ""), "expected an ARFF file with a line @data, found none"),
        (arff(1600, "AB").replace('"class"', '"person"'), "expected attributes from ACTIVITY to class"),
        ("", "expected an ARFF file with a line @data, found none"),
        (b"\xff\xfe", "expected text, found other bytes"),
    ],
)
def test_broken_windows_are_refused_by_file_and_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    files = {WATCH.format(1600): content.encode() if isinstance(content, str) else content}
    with pytest.raises(DataError, match=message):
        wisdm(tmp_path, files)


def test_other_features_than_in_the_files_before_are_refused(tmp_path: Path) -> None:
    files = wisdm_files(PERSONS)
    files[WATCH.format(1607)] = arff(1607, "AABB").replace('@attribute "X0" numeric\n', "").encode()
    with pytest.raises(DataError, match=r"1607_accel_watch.arff: its 3 features are not the 4 of the files before"):
        wisdm(tmp_path, files)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["glasses"]}, "devices are .*; give a list of some of phone, watch"),
        ({"sensors": "accel"}, "sensors are 'accel'"),
        ({"unseen": 1.0}, "unseen is 1.0; give the fraction"),
        ({"seed": -1}, "seed"),
        ({"sensors": ["gyro"]}, "found no windows of gyro on watch"),
        ({"raw": True}, "found no raw samples of accel on watch"),
    ],
)
def test_wrong_options_of_wisdm_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        wisdm(tmp_path, wisdm_files(PERSONS), **options)


def test_raw_samples_are_cut_into_windows_without_gaps(tmp_path: Path) -> None:
    parts = [("A", 0, 450), ("A", 900, 200), ("B", 1100, 399), ("B", 5000, 430)]
    lines = raw_samples(1600, parts).splitlines()
    repeated = "\n".join([*lines[:7], lines[6], *lines[7:]]).encode()
    data = wisdm(tmp_path, {RAW.format(1600): repeated, RAW.format(1601): b"\n"}, raw=True, unseen=0.0)
    (source,) = data.sources
    assert source.train_x.shape[1:] == (200, 3)
    starts = torch.cat([source.train_x, source.test_x])[:, 0, 0]  # type: ignore[list-item]
    assert sorted(starts.tolist()) == [0.5, 0.5, 200.5, 200.5], "two windows repeat another"
    assert source.train_x[0, :3, 1].tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1600,A,5,1,2;", r"1600_accel_watch.txt, line 4: expected 1600,activity,time,x,y,z; found '1600,A,5,1,2;'"),
        ("1601,A,5,1,2,3;", "line 4: expected 1600,activity"),
        ("1600,A,-5,1,2,3;", "line 4: expected 1600,activity"),
        ("1600,Z,5,1,2,3;", "line 4: expected an activity"),
        ("1600,A,5,1,2,x;", "line 4: expected numbers"),
    ],
)
def test_broken_raw_samples_are_refused_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    content = raw_samples(1600, [("A", 0, 3)]) + line
    with pytest.raises(DataError, match=message):
        wisdm(tmp_path, {RAW.format(1600): content.encode()}, raw=True)


# -- Beijing's air


def air(folder: Path, stations: dict[str, list[str]], **options: Any) -> SourceData:
    write_files(folder / "PRSA_Data_20130301-20170228", air_files(stations))
    return load_beijing_air(data_dir=folder, **options)


def test_stations_forecast_six_hours_ahead_on_one_clock(tmp_path: Path) -> None:
    out = {50, 51, *range(100, 140)}
    data = air(tmp_path, {"Dongsi": air_lines("Dongsi"), "Tiantan": air_lines("Tiantan", out)})
    whole, gaps = data.sources
    assert (whole.name, gaps.name, whole.task, whole.scale) == ("Dongsi", "Tiantan", "pm2.5", 100.0)
    assert whole.train_x.shape[1:] == (24, 15)
    for x, y, times in (
        (whole.train_x, whole.train_y, whole.train_times),
        (gaps.test_x, gaps.test_y, gaps.test_times),
    ):
        assert times is not None
        torch.testing.assert_close(y[:, 0] * 100, ((times + 6) % 500).float())
        assert torch.equal(x[:, -1, 1], times.float()), "PM10 of the last hour"  # type: ignore[call-overload, index]
        assert torch.equal(x[:, 0, 1], times.float() - 23)  # type: ignore[call-overload, index]
    assert whole.train_times is not None
    assert gaps.train_times is not None
    assert whole.train_times.tolist() == list(range(23, 28_051 - 6))
    assert whole.test_times is not None
    assert whole.test_times.tolist() == list(range(28_051, 35_064 - 6))
    left_out = set(whole.train_times.tolist()) - set(gaps.train_times.tolist())
    assert left_out == {44, 45, *range(94, 140), *range(106, 140 + 23)}
    after = gaps.train_x[gaps.train_times == 52][0]  # type: ignore[call-overload, index]
    assert after[-5:, 0].tolist() == [48, 49, 49, 49, 52], "the last value stands for hours"


def test_lines_may_be_missing_repeated_and_in_any_order(tmp_path: Path) -> None:
    lines = air_lines("Dongsi")
    some = [*lines[:1], *lines[500:], *lines[1:490], lines[7]]
    (expected,) = air(tmp_path / "one", {"Dongsi": air_lines("Dongsi", range(489, 499))}, every=5).sources
    (found,) = air(tmp_path / "other", {"Dongsi": some}, every=5).sources
    assert found.train_times is not None
    assert expected.train_times is not None
    assert torch.equal(found.train_times, expected.train_times)
    assert set((found.train_times.diff() % 5).tolist()) == {0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5,2013,3,1,4", "Dongsi_20130301-20170228.csv, line 4: expected 18 fields, found 5"),
        (air_line(2, "Dongsi", "n/a"), "line 4: expected a number or NA, found 'n/a'"),
        (air_line(2, "Dongsi", "inf"), "line 4: expected a finite number or NA"),
        (air_line(2, "Dongsi", 3).replace("NNW", "NNN"), "line 4: expected a direction of the wind or NA, found 'NNN'"),
        (air_line(2, "Dongsi", 3).replace("2013,3,1", "2013,3,32"), "line 4: expected year, month, day and hour"),
        (air_line(35_064, "Dongsi", 3), "line 4: 2017 3 1 0 is not from March 2013 to February 2017"),
        (air_line(1, "Dongsi", 77), "line 4: another line has other values of this hour"),
    ],
)
def test_broken_hours_are_refused_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        air(tmp_path, {"Dongsi": [*air_lines("Dongsi", count=2), line]})


def test_stations_without_columns_or_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a column PM10"):
        air(tmp_path, {"Dongsi": [line.replace("PM10", "PM100") for line in air_lines("Dongsi", count=3)]})
    with pytest.raises(DataError, match="0 samples to train on and 0 to test on"):
        air(tmp_path, {"Dongsi": air_lines("Dongsi", count=3)})
    with pytest.raises(DataError, match="every is 0"):
        load_beijing_air(0, tmp_path)


# -- CLINC150

DOMAINS: dict[str, object] = {"banking": ["balance", "transfer"], "travel": ["visa"], "home": ["lights"]}
TRAIN = [["what is my balance", "balance"], ["send money", "transfer"], ["do i need a visa", "visa"]]
TEST = [["my balance please", "balance"], ["visa for japan", "visa"], ["wire it", "transfer"]]


def clinc(folder: Path, queries: dict[str, object], domains: dict[str, object] = DOMAINS, **options: Any) -> SourceData:
    write_files(folder / "clinc150", clinc_files(queries, domains))
    return load_clinc150(data_dir=folder, **options)


def test_domains_are_sources_and_intents_their_classes(tmp_path: Path) -> None:
    data = clinc(tmp_path, {"train": [*TRAIN, TRAIN[0]], "test": TEST, "oos_test": [["hm", "oos"]]}, length=5)
    banking, travel = data.sources
    assert (banking.name, banking.class_names, banking.task) == ("banking", ("balance", "transfer"), None)
    assert banking.train_y.tolist() == [0, 1], "a repeated query counts once"
    assert (travel.train_y.tolist(), travel.test_y.tolist()) == ([0], [0])
    assert banking.train_x.shape == (2, 5)
    assert banking.train_x[0, 3] == banking.test_x[0, 1] != 0, "the token of a word"  # type: ignore[call-overload, index]
    assert banking.train_x[1, 2:].tolist() == [0, 0, 0]  # type: ignore[call-overload, index]


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ({"train": [*TRAIN, ["hello", "greeting"]], "test": TEST}, "train 3: intent 'greeting' is of no domain"),
        ({"train": [*TRAIN, ["hello"]], "test": TEST}, "train 3: expected a text and an intent, found"),
        ({"train": [*TRAIN, [5, "visa"]], "test": TEST}, "train 3: expected a text and an intent"),
        ({"train": TRAIN}, "expected a list 'test', found train"),
        ({"train": TRAIN[1:], "test": TEST}, "intent 'balance' has queries to test on, but none to train on"),
    ],
)
def test_broken_queries_are_refused(tmp_path: Path, queries: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        clinc(tmp_path, queries)


def test_broken_json_and_domains_are_refused(tmp_path: Path) -> None:
    queries = {"train": TRAIN, "test": TEST}
    for domains, message in (
        ({"banking": "balance"}, "expected a list of intents for 'banking'"),
        ({"banking": ["visa"], "travel": ["visa"]}, "intent 'visa' is in 'banking' and 'travel'"),
    ):
        with pytest.raises(DataError, match=message):
            clinc(tmp_path, queries, domains)
    with pytest.raises(DataError, match="vocabulary is 1 and length 24"):
        clinc(tmp_path, queries, vocabulary=1)
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(queries, indent=1)[:60])
    with pytest.raises(DataError, match=r"data_full.json, line \d+: expected JSON"):
        load_clinc150(data_dir=tmp_path)
    (tmp_path / "clinc150" / "domains.json").unlink()
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(queries))
    with pytest.raises(DataError, match=r"expected a file domains.json"):
        load_clinc150(data_dir=tmp_path)
