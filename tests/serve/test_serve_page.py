"""The page of a service in a real browser: live, without errors, narrow and wide, light and dark, with a token."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from browser import NARROW, WIDE, Reader, browser, needs_browser
from serving import TOKEN, X, http_settings, run_in_thread
from spcl.serve.server import Server
from spcl.sources import FolderHub, Publisher

pytestmark = needs_browser


PHONE = (360, 800)


HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with browser(tmp_path_factory.mktemp("browser")) as reader:
        yield reader


def start(folder: Path, **http: object) -> tuple[Server, threading.Thread, str]:
    """A service that has learned a few batches of two tasks; one task has ended."""
    server = Server(http_settings(folder, **http))
    publisher = Publisher(FolderHub(folder / "hub"))
    publisher.start("camera", classes=[HOSTILE, "dog"])
    publisher.start("speed", kind="regression")
    for _ in range(5):
        publisher.publish("camera", X, torch.arange(6) % 2)
        publisher.publish("speed", X, X[:, :1])
    publisher.publish("camera", X[:, :2], torch.arange(6) % 2)
    publisher.end("speed")
    return server, *run_in_thread(server)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server, thread, address = start(tmp_path_factory.mktemp("service"))
    yield address
    server.stop()
    thread.join(60)


def fact(reader: Reader, name: str) -> str:
    facts = reader.script(
        "return Object.fromEntries([...document.querySelectorAll('#facts > div')]"
        ".map((each) => [...each.children].map((part) => part.textContent)))"
    )
    return str(facts.get(name))


@pytest.mark.parametrize("size", [PHONE, WIDE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_shows_the_service(reader: Reader, address: str, size: tuple[int, int], scheme: str) -> None:
    reader.open(address, "", size, scheme)
    reader.wait(lambda: (fact(reader, "Tasks"), fact(reader, "Samples")) == ("1 running of 2", "60"))
    assert reader.text("#connection") == "live"
    assert [row.split("\n")[0] for row in reader.column("#tasks table", 1)] == ["camera", "speed"]
    assert reader.column("#tasks table", 2) == ["running", "finished"]
    assert reader.column("#tasks table", 10) == ["1", "0"]
    events = reader.text("#event-list")
    assert "speed ended" in events
    assert "camera: batch" in events
    for chart, curves in (("losses", 2), ("kappas", 2)):
        drawn = [path for path in reader.all(f"#{chart} path.curve") if path.get_attribute("d")]
        assert len(drawn) == curves, chart
    assert reader.all("#lanes path[fill]")
    assert reader.script("return document.documentElement.scrollWidth <= innerWidth")
    background = reader.script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(246, 247, 249)" if scheme == "light" else "rgb(15, 19, 25)")
    loaded = reader.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith(address) for name in loaded)
    assert reader.errors() == []


def test_curves_of_kappa_have_a_legend_in_their_colours(reader: Reader, address: str) -> None:
    reader.open(address)
    reader.wait(lambda: len(reader.all("#kappas path.curve")) == 2)
    assert reader.text("#kappa-legend").split("\n") == ["before the method", "after the method"]
    colours = "return [...document.querySelectorAll(arguments[0])].map((each) => getComputedStyle(each).stroke)"
    drawn = reader.script(colours, "#kappas path.curve")
    assert reader.script(colours, "#kappa-legend line") == drawn
    assert len(set(drawn)) == 2


def test_every_cell_of_the_table_is_seen_with_its_head_on_a_phone(reader: Reader, tmp_path: Path) -> None:
    server, thread, address = start(tmp_path)
    Publisher(FolderHub(tmp_path / "hub")).publish("later", X, torch.arange(6) % 2)
    reader.open(address, "", NARROW)
    said = "waiting; waits for its kind and classes"
    reader.wait(lambda: sorted(reader.column("#tasks table", 2))[-1].startswith(said))
    cells = reader.script(
        "return [...document.querySelectorAll('#tasks tbody tr > *')].map((cell) => {"
        "  const { left, right } = cell.getBoundingClientRect();"
        "  return [left, right, cell.scrollWidth - cell.clientWidth, getComputedStyle(cell, '::before').content];"
        "})"
    )
    assert len(cells) == 33
    assert all(left >= 0 and right <= 390 and hidden <= 1 for left, right, hidden, _ in cells)
    heads = reader.script("return [...document.querySelectorAll('#tasks thead th')].map((head) => head.textContent)")
    assert [head.strip('"') for *_, head in cells[:11]][1:] == heads[1:]
    server.stop()
    thread.join(60)


def test_choosing_a_task_brings_it_out_and_the_page_goes_on(reader: Reader, address: str) -> None:
    reader.open(address)
    reader.wait(lambda: len(reader.all("#legend button")) == 2)
    before = fact(reader, "Uptime")
    reader.click("#legend li:nth-child(2) button")
    assert len(reader.all("#losses path.faded")) == 1
    assert len(reader.all("#lanes g.faded")) == 1
    reader.wait(lambda: fact(reader, "Uptime") != before)
    assert reader.all("#legend [aria-pressed=true]")
    assert reader.errors() == []


def test_page_asks_for_the_token_and_waits_for_the_service_to_come_back(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    server, thread, address = start(tmp_path, token_file=tmp_path / "token")
    reader.open(address)
    reader.one("#token").send_keys("wrong\n")
    assert reader.sees("#login-note", "the service has another token")
    reader.script("document.getElementById('token').value = ''")
    reader.one("#token").send_keys(f"{TOKEN}\n")
    assert reader.sees("#connection", "live")
    assert reader.one("#facts").text
    server.stop()
    thread.join(60)
    assert reader.sees("#connection", "not connected, trying again")
    port = int(address.rstrip("/").rpartition(":")[2])
    server, thread, _ = start(tmp_path / "again", token_file=tmp_path / "token", port=port)
    assert reader.sees("#connection", "live")
    server.stop()
    thread.join(60)
    reader.open("about:blank")
    reader.errors()  # 401 and refused connections are in the console


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_sources_of_one_task_are_a_group_that_folds(reader: Reader, tmp_path: Path, size: tuple[int, int]) -> None:
    server = Server(http_settings(tmp_path))
    publisher = Publisher(FolderHub(tmp_path / "hub"))
    for number in range(12):
        task = "activity" if number < 9 else "mood"
        publisher.start(f"watch-{number:02}", classes=2, task=task, encoder="affine")
        publisher.publish(f"watch-{number:02}", X, torch.arange(6) % 2)
    publisher.end("watch-11")
    thread, address = run_in_thread(server)
    reader.open(address, "", size)
    reader.wait(lambda: (fact(reader, "Tasks"), fact(reader, "Sources")) == ("2", "11 running of 12"))
    names = [row.strip() for row in reader.column("#tasks table", 1)]
    assert names == ["activity", "mood", "watch-09", "watch-10", "watch-11"]  # nine are too many to be listed at once
    says = reader.column("#tasks table", 2)
    assert says[:2] == ["9 sources: 9 running", "3 sources: 2 running, 1 finished"]
    assert reader.column("#tasks table", 4)[:3] == ["54", "18", "6"]
    assert reader.column("#tasks table", 3)[:3] == ["2 classes", "2 classes", "encoder affine"]
    reader.click("#tasks [data-task=activity]")
    reader.click("#tasks [data-task=mood]")
    assert len(reader.column("#tasks table", 1)) == 11
    before = fact(reader, "Uptime")
    reader.wait(lambda: fact(reader, "Uptime") != before)  # drawn again
    assert len(reader.column("#tasks table", 1)) == 11
    assert reader.script("return document.activeElement.dataset.task") == "mood"
    assert reader.script("return document.documentElement.scrollWidth <= innerWidth")
    cells = reader.script(
        "return [...document.querySelectorAll('#tasks tbody tr > *')].map((cell) => cell.getBoundingClientRect().right)"
    )
    assert size == WIDE or all(right <= size[0] for right in cells)
    assert reader.errors() == []
    server.stop()
    thread.join(60)
