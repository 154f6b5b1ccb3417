"""WISDM (UCI 507): persons who wear a phone and a watch and do eighteen activities; one source per recording."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from spcl._util.validation import check_seed
from spcl.data.reading import Archive
from spcl.data.samples import SourceData, SourceSamples
from spcl.errors import DataError

TASK = "activity"
ACTIVITIES = {
    "A": "walking",
    "B": "jogging",
    "C": "stairs",
    "D": "sitting",
    "E": "standing",
    "F": "typing",
    "G": "brushing teeth",
    "H": "eating soup",
    "I": "eating chips",
    "J": "eating pasta",
    "K": "drinking",
    "L": "eating a sandwich",
    "M": "kicking",
    "O": "playing catch",
    "P": "dribbling",
    "Q": "writing",
    "R": "clapping",
    "S": "folding clothes",
}
DEVICES, SENSORS = ("phone", "watch"), ("accel", "gyro")

REPEATED = {("phone", "accel", person) for person in range(1611, 1618)}
"""Published files that repeat the windows of person 1610."""

RATE, SECONDS = 20, 10
LONGEST_STEP = 500_000_000
"""Nanoseconds between two samples of a recording; a longer pause starts a new one."""

FILE = re.compile(r"(?:.*/)?data_(\d+)_(accel|gyro)_(phone|watch)\.(arff|txt)")


class Recording(NamedTuple):
    """The windows of a person, device and sensor in the order of the recording, and their activities as letters."""

    person: int
    device: str
    sensor: str
    windows: NDArray[np.float32]
    letters: list[str]


def read_wisdm(
    archive: Archive,
    name: str,
    *,
    devices: Sequence[str] = ("watch",),
    sensors: Sequence[str] = ("accel",),
    raw: bool = False,
    unseen: float = 0.28,
    seed: int = 0,
) -> SourceData:
    """Read the windows of every person whose files are there; :func:`spcl.data.load_wisdm` says what the options are.

    Of every activity of a person, the last quarter of the windows is the test: neighbouring windows are alike.
    """
    _check_options(name, devices, sensors, unseen)
    check_seed(seed, DataError)
    recordings = list(_recordings(archive, devices, sensors, raw))
    if not recordings:
        kind = "raw samples" if raw else "windows"
        raise DataError(f"{archive.path}: found no {kind} of {', '.join(sensors)} on {', '.join(devices)}")
    letters = sorted({letter for recording in recordings for letter in recording.letters})
    persons = sorted({recording.person for recording in recordings})
    held = round(unseen * len(persons))
    out = set(np.random.default_rng(seed).permutation(persons)[:held].tolist())
    return SourceData(name, tuple(_source(each, letters, each.person in out) for each in recordings))


def _check_options(name: str, devices: Sequence[str], sensors: Sequence[str], unseen: float) -> None:
    for option, given, known in (("devices", devices, DEVICES), ("sensors", sensors, SENSORS)):
        wrong = [each for each in given if each not in known]
        if wrong or not given or isinstance(given, str):
            raise DataError(f"{name}: {option} are {given!r}; give a list of some of {', '.join(known)}")
    if not 0.0 <= unseen < 1.0:
        raise DataError(f"{name}: unseen is {unseen}; give the fraction of persons to hold out, from 0 to less than 1")


def _recordings(archive: Archive, devices: Sequence[str], sensors: Sequence[str], raw: bool) -> Iterator[Recording]:
    """Yield the recordings that have windows to train and to test on, by device, sensor and person.

    A window that repeats an earlier one of the same activity, device and sensor, of whoever, is left out.
    """
    kind = "txt" if raw else "arff"
    files = {(m[3], m[2], int(m[1])): m[0] for m in map(FILE.fullmatch, sorted(archive.names)) if m and m[4] == kind}
    known: set[bytes] = set()
    features: list[str] = []
    for device, sensor, person in sorted(files):
        if device not in devices or sensor not in sensors or (device, sensor, person) in REPEATED:
            continue
        lines, where = _lines(archive, files[device, sensor, person])
        windows, letters = _cut_samples(lines, where, person) if raw else _read_arff(lines, where, features)
        new = []
        for number, (letter, window) in enumerate(zip(letters, windows, strict=True)):
            content = f"{device} {sensor} {letter} ".encode() + window.tobytes()
            if content not in known:
                known.add(content)
                new.append(number)
        letters = [letters[number] for number in new]
        if any(letters.count(letter) > 1 for letter in set(letters)):
            yield Recording(person, device, sensor, windows[new], letters)


def _lines(archive: Archive, file: str) -> tuple[list[str], str]:
    try:
        return archive.read(file).decode().splitlines(), f"{archive.path}, {file}"
    except UnicodeDecodeError as error:
        raise DataError(f"{archive.path}, {file}: expected text, found other bytes ({error})") from error


# -- windows with features: ARFF files


def _read_arff(lines: Sequence[str], where: str, features: list[str]) -> tuple[NDArray[np.float32], list[str]]:
    """Return the features and the activity of every window.

    Args:
        lines: of the file: attributes, ``@data``, and a row for every window.
        where: the file, for errors.
        features: the names of the features; filled in by the first file.
    """
    columns: list[str] = []
    rows: list[list[float]] = []
    letters: list[str] = []
    in_rows = False
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("%"):
            continue
        if not in_rows:
            keyword, _, rest = line.partition(" ")
            if keyword.lower() == "@attribute":
                columns.append(rest.split()[0].strip("\"'"))
            in_rows = keyword.lower() == "@data"
            if in_rows:
                _check_columns(columns, features, where)
            continue
        letter, *values = line.split(",")
        if len(values) != len(features) + 1:
            raise DataError(
                f"{where}, line {number}: expected an activity, {len(features)} features and a person, "
                f"found {len(values) + 1} fields"
            )
        letters.append(_activity(letter, f"{where}, line {number}"))
        rows.append(_numbers(values[:-1], f"{where}, line {number}"))
    if not in_rows:
        raise DataError(f"{where}: expected an ARFF file with a line @data, found none")
    return np.array(rows, np.float32).reshape(len(rows), len(features)), letters


def _check_columns(columns: Sequence[str], features: list[str], where: str) -> None:
    first, *middle, last = columns if len(columns) > 2 else ["", "", ""]
    if (first.upper(), last.lower()) != ("ACTIVITY", "class"):
        raise DataError(
            f"{where}: expected attributes from ACTIVITY to class, found {', '.join(columns[:3]) or 'none'}"
        )
    features.extend([] if features else middle)
    if middle != features:
        raise DataError(f"{where}: its {len(middle)} features are not the {len(features)} of the files before")


def _activity(letter: str, where: str) -> str:
    letter = letter.strip().strip("\"'")
    if letter not in ACTIVITIES:
        raise DataError(f"{where}: expected an activity from A to S, without N, found {letter!r:.40}")
    return letter


def _numbers(values: Sequence[str], where: str) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except ValueError as error:
        raise DataError(f"{where}: expected numbers ({error})") from error
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{where}: expected finite numbers, found NaN or infinity")
    return numbers


# -- raw samples: text files


def _cut_samples(lines: Sequence[str], where: str, person: int) -> tuple[NDArray[np.float32], list[str]]:
    """Cut the samples of every activity into windows of ten seconds, and return them with their activities.

    A window is without gaps: after a pause, or where the clock goes back, the next one begins. A sample with the time
    of the one before repeats it, and is left out.
    """
    samples: list[list[float]] = []
    windows: list[list[list[float]]] = []
    letters: list[str] = []
    before = ("", 0)
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line:
            continue
        fields = line.rstrip(";").split(",")
        if len(fields) != 6 or not fields[2].strip().isdecimal() or fields[0].strip() != str(person):
            raise DataError(f"{where}, line {number}: expected {person},activity,time,x,y,z; found {line!r:.60}")
        letter, time = _activity(fields[1], f"{where}, line {number}"), int(fields[2])
        values = _numbers(fields[3:], f"{where}, line {number}")
        step = time - before[1]
        if letter == before[0] and step == 0:
            continue
        if letter != before[0] or not 0 < step <= LONGEST_STEP:
            samples = []
        before = letter, time
        samples.append(values)
        if len(samples) == RATE * SECONDS:
            windows.append(samples)
            letters.append(letter)
            samples = []
    return np.array(windows, np.float32).reshape(len(windows), RATE * SECONDS, 3), letters


# -- a source


def _source(recording: Recording, letters: Sequence[str], unseen: bool) -> SourceSamples:
    test = _last_quarters(recording.letters)
    x = torch.from_numpy(recording.windows)
    y = torch.tensor([letters.index(letter) for letter in recording.letters])
    return SourceSamples(
        f"{recording.device}-{recording.sensor}-{recording.person}",
        "classification",
        x[~test],
        y[~test],
        x[test],
        y[test],
        tuple(ACTIVITIES[letter] for letter in letters),
        task=TASK,
        unseen=unseen,
    )


def _last_quarters(letters: Sequence[str]) -> torch.Tensor:
    """Return a mask of the last quarter of every activity's windows, at least one of two, and never all.

    >>> _last_quarters("AAAAAAABBC").long()
    tensor([0, 0, 0, 0, 0, 1, 1, 0, 1, 0])
    """
    mask = torch.zeros(len(letters), dtype=torch.bool)
    for letter in set(letters):
        members = [number for number, each in enumerate(letters) if each == letter]
        last = min(max(1, round(len(members) / 4)), len(members) - 1)
        mask[members[len(members) - last :]] = True
    return mask
