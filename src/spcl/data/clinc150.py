"""CLINC150: what people ask an assistant; one source per domain, whose classes are its intents."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spcl.data.reading import Archive
from spcl.data.samples import SourceData, SourceSamples
from spcl.errors import DataError

QUERIES, DOMAINS = "data_full.json", "domains.json"
WORD = re.compile(r"[a-z0-9']+")
Query = tuple[str, str]
"""A text and its intent."""


def read_clinc150(archive: Archive, name: str, *, vocabulary: int = 8192, length: int = 24) -> SourceData:
    """Read the domains that are there; :func:`spcl.data.load_clinc150` says what the options are."""
    if vocabulary < 2 or length < 1:
        raise DataError(f"{name}: vocabulary is {vocabulary} and length {length}; give at least 2 tokens and length 1")
    queries, domains = _object(archive, QUERIES), _object(archive, DOMAINS)
    intents = _domain_of_intents(domains, f"{archive.path}, {DOMAINS}")
    splits = {split: _queries(queries, split, intents, f"{archive.path}, {QUERIES}") for split in ("train", "test")}
    sources = []
    for domain in domains:
        train, test = ([query for query in splits[split] if intents[query[1]] == domain] for split in splits)
        names = sorted({intent for _, intent in train})
        if missing := {intent for _, intent in test} - set(names):
            raise DataError(
                f"{archive.path}, {QUERIES}: intent {min(missing)!r} has queries to test on, but none to train on"
            )
        if train and test:
            (x, y), (test_x, test_y) = (_tensors(each, names, vocabulary, length) for each in (train, test))
            sources.append(SourceSamples(domain, "classification", x, y, test_x, test_y, tuple(names)))
    return SourceData(name, tuple(sources))


def tokenize(text: str, vocabulary: int, length: int) -> list[int]:
    """Return a token of 1..vocabulary-1 for each of the first words, a checksum of the word, and zeros to fill up.

    >>> tokenize("What's the weather? The weather!", 8192, 6)
    [2806, 4129, 6664, 4129, 6664, 0]
    """
    words = WORD.findall(text.lower())[:length]
    tokens = [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in words]
    return tokens + [0] * (length - len(tokens))


def _tensors(queries: Sequence[Query], names: Sequence[str], vocabulary: int, length: int) -> tuple[Tensor, Tensor]:
    number = {name: label for label, name in enumerate(names)}
    tokens = torch.tensor([tokenize(text, vocabulary, length) for text, _ in queries])
    return tokens, torch.tensor([number[intent] for _, intent in queries])


def _object(archive: Archive, file: str) -> dict[str, Any]:
    where = f"{archive.path}, {file}"
    try:
        content = json.loads(archive.require(file))
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, line {error.lineno}: expected JSON ({error.msg}, column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected text, found other bytes ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{where}: expected an object, found {type(content).__name__}")
    return content


def _domain_of_intents(domains: Mapping[str, Any], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for domain, intents in domains.items():
        if not isinstance(intents, list) or not all(isinstance(intent, str) for intent in intents):
            raise DataError(f"{where}: expected a list of intents for {domain!r}, found {intents!r:.60}")
        for intent in intents:
            if found.setdefault(intent, domain) != domain:
                raise DataError(f"{where}: intent {intent!r} is in {found[intent]!r} and {domain!r}; keep it in one")
    return found


def _queries(queries: Mapping[str, Any], split: str, intents: Mapping[str, str], where: str) -> list[Query]:
    """Return the queries of a split, each once."""
    listed = queries.get(split)
    if not isinstance(listed, list):
        raise DataError(f"{where}: expected a list {split!r}, found {', '.join(queries) or 'nothing'}")
    found: dict[Query, None] = {}
    for number, query in enumerate(listed):
        match query:
            case [str(text), str(intent)] if intent in intents:
                found[text, intent] = None
            case [str(), str(intent)]:
                raise DataError(f"{where}, {split} {number}: intent {intent!r} is of no domain in {DOMAINS}")
            case _:
                raise DataError(f"{where}, {split} {number}: expected a text and an intent, found {query!r:.60}")
    return list(found)
