"""Requests whose headers are malformed are refused like those of other web sites."""

import pytest
from starlette.datastructures import Headers

from spcl.serve.guard import _is_local


@pytest.mark.parametrize(
    ("headers", "is_local"),
    [
        ({"host": "127.0.0.1:8800"}, True),
        ({"host": "[::1]:8800", "origin": "http://[::1]:8800"}, True),
        ({"host": "127.0.0.1:8800", "origin": "http://other.example"}, False),
        ({"host": "[::1"}, False),
        ({"host": "127.0.0.1", "origin": "http://[::1"}, False),
        ({}, False),
    ],
)
def test_only_well_formed_requests_of_this_machine_are_local(headers: dict[str, str], is_local: bool) -> None:
    assert _is_local(Headers(headers)) is is_local
