"""Beijing multi-site air quality (UCI 501): stations on one clock, each a source that forecasts its PM2.5."""

import csv
import io
import math
import re
from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from spcl.data.reading import Archive
from spcl.data.samples import SourceData, SourceSamples
from spcl.errors import DataError

TASK = "pm2.5"
START, HOURS = datetime(2013, 3, 1), 35_064
CLOCK = ("year", "month", "day", "hour")
MEASURED = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM")
COLUMNS = (*MEASURED, "wd_sin", "wd_cos", "hour_sin", "hour_cos")
"""The columns of a sample: measurements in the publisher's units, direction of the wind, time of the day."""

DIRECTIONS = ["N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE", "S", "SSW", "SW", "WSW", "W", "WNW", "NW", "NNW"]
WINDOW, AHEAD = 24, 6
LONGEST_GAP = 6
"""Hours without PM2.5 over which the last value stands; after a longer gap the station counts as out."""

SCALE = 100.0
"""Targets are in units of 100 µg/m³."""

TEST_FROM = HOURS * 4 // 5
FILE = re.compile(r"(?:.*/)?PRSA_Data_([^/]+)_20130301-20170228\.csv")


def read_beijing_air(archive: Archive, name: str, *, every: int = 1) -> SourceData:
    """Read the stations whose files are there; :func:`spcl.data.load_beijing_air` says what the option is."""
    if every < 1:
        raise DataError(f"{name}: every is {every}; give a number of hours, at least 1")
    files = sorted((m[1], m[0]) for m in map(FILE.fullmatch, archive.names) if m)
    if not files:
        raise DataError(f"{archive.path}: expected files PRSA_Data_STATION_20130301-20170228.csv, found none")
    return SourceData(name, tuple(_source(station, archive, file, every) for station, file in files))


def _source(station: str, archive: Archive, file: str, every: int) -> SourceSamples:
    where = f"{archive.path}, {file}"
    table = _read_table(archive.read(file), where)
    target = table[:, 0].copy()
    is_out = _hours_since_known(target) > LONGEST_GAP
    filled = _carried_forward(table)
    filled[is_out] = np.nan
    last = np.arange(WINDOW - 1, HOURS - AHEAD, every)
    known = np.isfinite(filled).all(axis=1)
    whole = np.convolve(known, np.ones(WINDOW), mode="valid") == WINDOW
    last = last[whole[last - WINDOW + 1] & ~np.isnan(target[last + AHEAD])]
    train, test = last[last + AHEAD < TEST_FROM], last[last >= TEST_FROM]
    if not (len(train) and len(test)):
        raise DataError(
            f"{where}: {len(train)} samples to train on and {len(test)} to test on; a sample needs {WINDOW} hours in "
            f"which every column has been measured before, and PM2.5 {AHEAD} hours later"
        )
    windows = sliding_window_view(filled.astype(np.float32), WINDOW, axis=0).transpose(0, 2, 1)
    (train_x, train_y), (test_x, test_y) = (
        (torch.from_numpy(windows[hours - WINDOW + 1]), torch.from_numpy(target[hours + AHEAD]).float() / SCALE)
        for hours in (train, test)
    )
    return SourceSamples(
        station,
        "regression",
        train_x,
        train_y,
        test_x,
        test_y,
        ("PM2.5",),
        task=TASK,
        scale=SCALE,
        train_times=torch.from_numpy(train),
        test_times=torch.from_numpy(test),
    )


# -- the table of a station


def _read_table(content: bytes, where: str) -> NDArray[np.float64]:
    """Return the columns of every hour of the clock; what is missing, and hours without a line, are NaN."""
    try:
        lines = csv.reader(io.StringIO(content.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected text, found other bytes ({error})") from error
    header = [column.strip() for column in next(lines, [])]
    missing = [column for column in (*CLOCK, *MEASURED, "wd") if column not in header]
    if missing:
        raise DataError(f"{where}: expected a column {missing[0]}, found {', '.join(header) or 'nothing'}")
    places = [header.index(column) for column in (*CLOCK, *MEASURED, "wd")]
    table = np.full((HOURS, len(COLUMNS)), np.nan)
    lines_of_hours: dict[int, list[str]] = {}
    for number, fields in enumerate(lines, 2):
        if not fields:
            continue
        at = f"{where}, line {number}"
        if len(fields) != len(header):
            raise DataError(f"{at}: expected {len(header)} fields, found {len(fields)}")
        chosen = [fields[place].strip() for place in places]
        hour, known = _hour(chosen[:4], at), chosen[4:]
        if lines_of_hours.setdefault(hour, known) != known:
            raise DataError(f"{at}: another line has other values of this hour; keep one of them")
        table[hour, : len(MEASURED)] = [_number(value, at) for value in known[:-1]]
        table[hour, len(MEASURED) : len(MEASURED) + 2] = _direction(known[-1], at)
    angle = np.arange(HOURS) / 24 * 2 * np.pi
    table[:, -2], table[:, -1] = np.sin(angle), np.cos(angle)
    return table


def _hour(clock: Sequence[str], where: str) -> int:
    """Return the number of an hour on the clock."""
    try:
        hour = (datetime(*map(int, clock)) - START) // timedelta(hours=1)  # type: ignore[arg-type]
    except ValueError as error:
        raise DataError(f"{where}: expected year, month, day and hour, found {' '.join(clock)} ({error})") from error
    if not 0 <= hour < HOURS:
        raise DataError(f"{where}: {' '.join(clock)} is not from March 2013 to February 2017")
    return hour


def _number(value: str, where: str) -> float:
    if value == "NA":
        return np.nan
    try:
        number = float(value)
    except ValueError as error:
        raise DataError(f"{where}: expected a number or NA, found {value!r:.40}") from error
    if not math.isfinite(number):
        raise DataError(f"{where}: expected a finite number or NA, found {value!r:.40}")
    return number


def _direction(value: str, where: str) -> tuple[float, float]:
    """Return sine and cosine of the direction of the wind."""
    if value == "NA":
        return np.nan, np.nan
    if value not in DIRECTIONS:
        raise DataError(f"{where}: expected a direction of the wind or NA, found {value!r:.40}")
    angle = DIRECTIONS.index(value) / len(DIRECTIONS) * 2 * np.pi
    return float(np.sin(angle)), float(np.cos(angle))


# -- gaps


def _hours_since_known(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for every hour how long ago the last known value was; before the first one, longer than the clock.

    >>> _hours_since_known(np.array([np.nan, 3.0, np.nan, np.nan, 1.0]))[1:]
    array([0, 1, 2, 0])
    """
    hours = np.arange(len(values))
    last = np.maximum.accumulate(np.where(np.isnan(values), -HOURS, hours))
    since: NDArray[np.int64] = hours - last
    return since


def _carried_forward(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace missing values by the last known value of the column; those before the first one stay missing."""
    since = np.stack([_hours_since_known(column) for column in table.T], axis=1)
    rows = np.maximum(np.arange(len(table))[:, None] - since, 0)
    filled: NDArray[np.float64] = np.take_along_axis(table, rows, axis=0)
    return filled
