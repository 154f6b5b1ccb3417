"""A folder that other users may write to harms neither the reader's files nor its other tasks."""

import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from list_hub import batch, outcomes, source_of, values
from serving import publish
from spcl.errors import TaskError
from spcl.sources import (
    FolderHub,
    HubError,
    Publisher,
    Rejected,
    announce,
    encode_batch,
)
from spcl.tasks import TaskDescription

TWO = TaskDescription.of("a", classes=2)


def test_partial_and_foreign_files_do_not_disturb(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    folder = tmp_path / "tasks" / "a"
    folder.mkdir()
    (folder / ".half.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("hello")
    (folder / "2026-01.safetensors").write_bytes(encode_batch(batch(1)))
    (folder / "2026-02.safetensors").write_bytes(encode_batch(batch(2)))
    publisher = Publisher(hub)
    for number in (3, 4):
        publisher.publish("a", *batch(number))
    publisher.end("a")
    assert values(source_of(hub, first_sight=TWO).read(None)) == [1, 2, 3, 4]


def test_files_of_any_size_are_read_whole_and_apart(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    contents = [bytes([number]) * size for number, size in enumerate((1, 0, 2**16 - 1, 2**16, 2**16 + 1, 300_000, 7))]
    for content in contents:
        hub.append("camera", content)
    found = hub.read({"camera": None}, len(contents), 0.0, 2**20)["camera"]
    assert [bytes(data) for _, data in found] == contents


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "private.key"
    path.parent.mkdir()
    path.write_bytes(b"the private key")
    return path


@pytest.fixture
def hub(tmp_path: Path) -> FolderHub:
    return FolderHub(tmp_path / "hub")


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def test_a_link_as_a_message_is_refused_and_its_target_is_kept_nowhere(
    hub: FolderHub, secret: Path, tmp_path: Path
) -> None:
    Publisher(hub).publish("a", *batch(1))
    for name in ("1", "2"):
        (tmp_path / f"hub/tasks/a/{name}.safetensors").symlink_to(secret)
    found = list(islice(source_of(hub, description=TWO).read(None), 3))
    assert [reason.endswith("it is a link") for reason in outcomes(found)] == [False, True, True]
    for each in found:
        if isinstance(each, Rejected):
            hub.dead_letter("a", each.position, each.data, each.reason)
    letters = list(files(tmp_path / "hub/dead-letters"))
    assert sorted(path.name for path in letters) == ["1.safetensors", "1.txt", "2.safetensors", "2.txt"]
    assert not [path for path in letters if path.is_symlink() or b"private key" in path.read_bytes()]


def test_a_link_in_place_of_a_task_is_neither_read_nor_trimmed(hub: FolderHub, secret: Path, tmp_path: Path) -> None:
    for number in range(3):
        (secret.parent / f"{number}.safetensors").write_bytes(encode_batch(batch(number), announce("a", classes=2)))
    before = {path.name: path.read_bytes() for path in secret.parent.iterdir()}
    (tmp_path / "hub/tasks/a").symlink_to(secret.parent)
    assert hub.tasks() == []
    for call in (
        lambda: hub.trim("a", "2"),
        lambda: hub.append("a", b"", keep=1),
        lambda: hub.end("a"),
        lambda: hub.backlog("a", None),
        lambda: hub.read({"a": None}, 1, 0.0, 1000),
        lambda: hub.dead_letter("a", "1", b"", "why"),
    ):
        with pytest.raises(OSError, match="link"):
            call()
    assert {path.name: path.read_bytes() for path in secret.parent.iterdir()} == before


@pytest.mark.parametrize("name", ["tasks", "dead-letters"])
def test_a_link_in_place_of_a_folder_of_the_hub_is_refused(name: str, secret: Path, tmp_path: Path) -> None:
    hub = FolderHub(tmp_path / "hub")
    folder = tmp_path / "hub" / name
    if folder.exists():
        folder.rmdir()
    folder.symlink_to(secret.parent)
    with pytest.raises(OSError, match=r"link|Not a directory"):
        hub.append("a", b"") if name == "tasks" else hub.dead_letter("a", "1", b"junk", "why")
    assert list(secret.parent.iterdir()) == [secret]


@pytest.mark.parametrize("name", [".lock", ".ended"])
def test_links_in_place_of_a_lock_or_mark_leave_their_target_alone(
    name: str, hub: FolderHub, secret: Path, tmp_path: Path
) -> None:
    (tmp_path / "hub/tasks/a").mkdir()
    (tmp_path / "hub/tasks/a" / name).symlink_to(secret)
    with pytest.raises((OSError, TaskError), match=r"symbolic|has ended"):
        hub.append("a", b"")
    assert secret.read_bytes() == b"the private key"


def test_dead_letters_are_for_their_owner_alone(hub: FolderHub, tmp_path: Path) -> None:
    letters = tmp_path / "hub/dead-letters"
    letters.mkdir(mode=0o755)  # as an earlier version left it
    Publisher(hub).publish("a", *batch(1))
    hub.dead_letter("a", "1", b"junk", "why")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (letters, *letters.rglob("*"))}
    assert modes == {"dead-letters": 0o700, "a": 0o700, "1.safetensors": 0o600, "1.txt": 0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users")
def test_dead_letters_are_not_put_into_another_users_folder(hub: FolderHub, tmp_path: Path) -> None:
    letters = tmp_path / "hub/dead-letters"
    letters.mkdir(mode=0o777)
    os.chown(letters, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        hub.dead_letter("a", "1", b"junk", "why")
    assert list(letters.iterdir()) == []


@pytest.fixture
def hanging(hub: FolderHub, tmp_path: Path) -> Iterator[None]:
    """A publisher of task a hangs inside its lock."""
    Publisher(hub).publish("a", *batch(0))
    with (tmp_path / "hub/tasks/a/.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("hanging")
@pytest.mark.timeout(20)
def test_nobody_waits_without_end_for_a_publisher_that_hangs(hub: FolderHub, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(HubError, match=r"a publisher has held the lock of task 'a' for 0\.1 s"):
        Publisher(FolderHub(tmp_path / "hub", patience=0.1)).publish("a", *batch(1))
    with pytest.raises(HubError, match="for 1 s"):
        hub.end("a")
    assert time.monotonic() < begin + 10.0
    assert hub.backlog("a", None) == 1
    assert outcomes(islice(source_of(hub, description=TWO).read(None), 1)) == ["learned"]
    hub.append("b", b"")


def test_publishers_wait_for_one_another(hub: FolderHub, tmp_path: Path) -> None:
    Publisher(hub).publish("a", *batch(0))
    publishing = threading.Thread(target=lambda: Publisher(hub).publish("a", *batch(1)))
    with (tmp_path / "hub/tasks/a/.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        publishing.start()
        time.sleep(0.1)
        assert hub.backlog("a", None) == 1
    publishing.join()
    assert hub.backlog("a", None) == 2


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every folder that is listed."""
    found: list[object] = []
    scandir = os.scandir

    def observed(path: int) -> object:
        found.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", observed)
    return found


def fill(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "hub/tasks/a"
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:020}.safetensors").touch()


def test_publishers_that_wait_for_space_do_not_list_the_folder_again_and_again(
    hub: FolderHub, tmp_path: Path, listings: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spcl.sources.folder.RELIST_SECONDS", 600.0)
    fill(tmp_path, 3000)
    publishers = [Publisher(FolderHub(tmp_path / "hub"), capacity=3000, patience=0.3) for _ in range(2)]
    for publisher in publishers:
        with pytest.raises(HubError, match="has been full with 3000 messages"):
            publisher.publish("a", *batch(0))
    assert len(listings) == 4  # twice by each
    hub.trim("a", f"{2000:020}")
    for number in range(20):
        publishers[number % 2].publish("a", *batch(number))
    assert len(listings) <= 16
    assert hub.backlog("a", None) == 1020


def test_publishers_that_trim_list_the_folder_seldom_and_keep_the_newest(
    tmp_path: Path, listings: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spcl.sources.folder.RELIST_SECONDS", 600.0)
    fill(tmp_path, 100)
    publishers = [Publisher(FolderHub(tmp_path / "hub"), capacity=50, when_full="trim") for _ in range(2)]
    for number in range(60):
        publishers[number % 2].publish("a", *batch(number))
    assert len(listings) <= 20
    names = sorted(path.name for path in (tmp_path / "hub/tasks/a").glob("*.safetensors"))
    assert names == [f"{number:020}.safetensors" for number in range(110, 160)]


def test_files_of_another_origin_are_counted_and_numbers_follow_them(hub: FolderHub, tmp_path: Path) -> None:
    publisher = Publisher(hub, capacity=5, patience=0.0)
    publisher.publish("a", *batch(0))
    for number in range(3):
        (tmp_path / f"hub/tasks/a/x{number}.safetensors").write_bytes(
            encode_batch(batch(number), announce("a", classes=2))
        )
    publisher.publish("a", *batch(1))
    with pytest.raises(HubError, match="full"):
        publisher.publish("a", *batch(2))
    names = sorted(path.stem for path in (tmp_path / "hub/tasks/a").glob("*.safetensors"))
    assert names[1:] == ["x0", "x1", "x2", f"x2-{1:020}"]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"count": 1, "last": "../../x"}', b'{"last": 5, "changed": 7}', b'{"numbers": {"a": 7}}'],
)
def test_a_damaged_record_of_publishers_changes_nothing(content: bytes, hub: FolderHub, tmp_path: Path) -> None:
    Publisher(hub).publish("a", *batch(0))
    (tmp_path / "hub/tasks/a/.publishers/record.json").write_bytes(content)
    Publisher(hub).publish("a", *batch(1))
    assert hub.backlog("a", None) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub"]


def test_files_that_a_killed_process_left_are_deleted(hub: FolderHub, tmp_path: Path) -> None:
    Publisher(hub).publish("a", *batch(0))
    hub.dead_letter("a", "1", b"junk", "why")
    publishers, letters = tmp_path / "hub/tasks/a", tmp_path / "hub/dead-letters/a"
    for path in (publishers, publishers / ".publishers", letters):
        (path / ".2.safetensors.0123abcd.partial").write_bytes(b"half")
    os.utime(letters / ".2.safetensors.0123abcd.partial", (0, 0))
    (letters / ".3.safetensors.0123abcd.partial").write_bytes(b"of another service, which is writing it")
    Publisher(hub).publish("a", *batch(1))
    FolderHub(tmp_path / "hub").dead_letter("a", "2", b"junk", "why")
    assert [path.name for path in (tmp_path / "hub").rglob("*.partial")] == [".3.safetensors.0123abcd.partial"]


def test_files_that_are_too_large_or_none_are_put_away_unread(tmp_path: Path) -> None:
    hub, folder = FolderHub(tmp_path), tmp_path / "tasks/a"
    publish(hub, "a", 1)
    (folder / "1.safetensors").mkdir()
    os.mkfifo(folder / "2.safetensors")
    with (folder / "3.safetensors").open("wb") as file:
        file.truncate(2**40)
    (folder / "4.safetensors").write_bytes(encode_batch(batch(4)))
    first, *reasons, last = outcomes(islice(source_of(hub, max_bytes=100_000).read(None), 5))
    assert first == last == "learned"
    assert "Is a directory" in reasons[0]
    assert "cannot be read" in reasons[1]
    assert "has 1099511627776 bytes, and at most 100000" in reasons[2]
    hub.dead_letter("a", "3", b"", reasons[2])
    assert (tmp_path / "dead-letters/a/3.safetensors").stat().st_size == 2**40
    hub.trim("a", "4")
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["1.safetensors", "4.safetensors"]


def test_only_the_newest_dead_letters_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spcl.sources.folder.MOST_DEAD_LETTERS", 20)
    monkeypatch.setattr("spcl.sources.folder.COUNTED_EVERY", 0)
    hub = FolderHub(tmp_path)
    for number in range(50):
        hub.dead_letter("a", f"{number:02}", b"junk", "why")
    names = sorted(path.name for path in (tmp_path / "dead-letters/a").iterdir())
    assert names == sorted(f"{number}.{kind}" for number in range(30, 50) for kind in ("safetensors", "txt"))
