"""The built documentation site in a real browser: it fits every window, and its search works without a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import NARROW, WIDE, Reader, browser, needs_browser

SITE = Path(__file__).resolve().parents[2] / "docs" / "build"
PAGES = ("index", "install", "tutorials/live", "concepts", "methods", "settings", "scaling", "performance", "serve")

pytestmark = [
    needs_browser,
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="the site is not built; run make docs"),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with browser(tmp_path_factory.mktemp("browser")) as reader:
        yield reader


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_not_wider_than_its_window(reader: Reader, page: str) -> None:
    for size, scheme in ((NARROW, "light"), (WIDE, "dark")):
        reader.open(SITE / f"{page}.html", size=size, scheme=scheme)
        assert reader.one("h1").text
        assert reader.script("return document.documentElement.scrollWidth") <= size[0]
    assert reader.errors() == []


def test_search_finds_pages_without_a_server(reader: Reader) -> None:
    reader.open(SITE / "search.html", "?q=orthogonality")
    assert reader.wait(lambda: "The method spcl" in [link.text for link in reader.all("ul.search li a")])
