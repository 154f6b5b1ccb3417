import json
import math
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from disk import largest_file
from spcl import checkpoint
from spcl.checkpoint import DTYPES, read_checkpoint, read_newest, write_checkpoint
from spcl.errors import CheckpointError

SMALL = {"step": 3, "tasks": ["a", {"classes": 2}], "w": torch.tensor([1.5, -0.0]), "y": torch.tensor([7, 8])}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_identical(found: Any, expected: Any) -> None:
    """Equality to the last bit, after tuples have become lists."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert (found.dtype, found.shape, found.device.type) == (expected.dtype, expected.shape, "cpu")
        assert bits(found) == bits(expected.detach())
    elif isinstance(expected, dict):
        assert type(found) is dict
        assert list(found) == list(expected)
        for key in expected:
            assert_identical(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is list
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_identical(one, other)
    elif isinstance(expected, float):
        assert math.isnan(found) if math.isnan(expected) else struct.pack("d", found) == struct.pack("d", expected)
    else:
        assert type(found) is type(expected)
        assert found == expected


@st.composite
def any_bits(draw: st.DrawFn) -> Tensor:
    """Tensors of every type and shape, filled with arbitrary bytes: NaN payloads, infinities and negative zeros."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    raw = bytearray(draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


KEYS = st.text(max_size=4) | st.sampled_from(["$tensor", "$float", "$", "$$x", "5", "$5", "-5"]) | st.integers()
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | any_bits()
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(state=STATES)
def test_states_are_restored_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("state") / "c"
    write_checkpoint(path, state)
    assert_identical(read_checkpoint(path), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: MultiStepLR(optimizer, [2, 5, 5]),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
        lambda optimizer: SequentialLR(optimizer, [ConstantLR(optimizer), MultiStepLR(optimizer, [1, 3])], [3]),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
    ],
    ids=["multi-step", "lambda", "one-cycle", "sequential", "plateau"],
)
def test_restored_schedule_continues_identically(tmp_path: Path, make: Callable[[SGD], Any]) -> None:
    def rates(optimizer: SGD, schedule: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step(*[1.0] * isinstance(schedule, ReduceLROnPlateau))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    def begun() -> tuple[SGD, Any]:
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.ones(1)
        optimizer = SGD([weight], lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    optimizer, schedule = begun()
    rates(optimizer, schedule, 4)
    write_checkpoint(tmp_path / "c", {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    saved = read_checkpoint(tmp_path / "c")
    other, continued = begun()
    other.load_state_dict(saved["optimizer"])
    continued.load_state_dict(saved["schedule"])
    assert rates(other, continued, 10) == rates(optimizer, schedule, 10)
    assert_identical(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_escaped_keys_of_the_first_format_are_read(tmp_path: Path) -> None:
    structure = json.dumps({"$$5": 1, "5": 2, "$$$x": 3, "": {"$float": "inf"}})
    checkpoint._write_file(tmp_path / "c", structure, {})
    assert read_checkpoint(tmp_path / "c") == {"$5": 1, "5": 2, "$$x": 3, "": math.inf}


def test_views_and_empty_tensors_are_restored(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "base": base,
        "same": base,
        "overlapping": base[1:3],
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": base[:1].expand(5, 6),
        "parameter": torch.nn.Parameter(base),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.bool),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    write_checkpoint(tmp_path / "c", state)
    found = read_checkpoint(tmp_path / "c")
    assert_identical(found, state)
    found["base"].zero_()
    assert_identical(found["same"], base)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_restored_on_the_host(tmp_path: Path) -> None:
    state = {"x": torch.randn(5, 7, device="cuda").T}
    write_checkpoint(tmp_path / "c", state)
    assert_identical(read_checkpoint(tmp_path / "c"), {"x": state["x"].cpu()})


def test_file_is_a_standard_safetensors_file_with_aligned_tensors(tmp_path: Path) -> None:
    tensors = [torch.ones(size, dtype=dtype) for size, dtype in enumerate(DTYPES, start=1)]
    write_checkpoint(tmp_path / "c", {"tensors": tensors[::-1]})
    found = load_file(tmp_path / "c")
    assert sorted(map(bits, found.values())) == sorted(map(bits, tensors))
    data = (tmp_path / "c").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    for name, tensor in found.items():
        assert (8 + length + entries[name]["data_offsets"][0]) % tensor.element_size() == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1.5: 2}, r"state\['v'\] has the key 1\.5; keys .* must be strings or integers"),
        ({True: 2}, r"state\['v'\] has the key True; keys"),
        ([{"deep": {3}}], r"state\['v'\]\[0\]\['deep'\] is a set"),
        (Path("x"), r"state\['v'\] is a .*Path"),
        (torch.zeros(1, dtype=torch.complex128), r"state\['v'\] .* torch.complex128"),
        (torch.eye(2).to_sparse(), r"state\['v'\] is a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), r"state\['v'\]"),
    ],
)
def test_unsupported_values_are_named_and_nothing_is_written(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        write_checkpoint(tmp_path / "c", {"v": value})
    assert list(tmp_path.iterdir()) == []


def test_replaced_checkpoint_is_kept_as_previous(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for version in range(3):
        write_checkpoint(path, {"version": version})
    assert read_checkpoint(path) == {"version": 2}
    assert read_checkpoint(tmp_path / "c.previous") == {"version": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "c.previous"]


@pytest.mark.parametrize("links", [1, 2])
def test_symbolic_links_are_followed(tmp_path: Path, links: int) -> None:
    (tmp_path / "real").mkdir()
    target = Path("real/c")
    for number in range(links):
        (tmp_path / f"link {number}").symlink_to(target)
        target = Path(f"link {number}")
    link = tmp_path / target
    for version in range(3):
        write_checkpoint(link, {"version": version})
    assert all((tmp_path / f"link {number}").is_symlink() for number in range(links))
    assert read_checkpoint(link) == read_checkpoint(tmp_path / "real" / "c") == {"version": 2}
    assert sorted(file.name for file in tmp_path.rglob("c*")) == ["c", "c.previous"]
    damage(tmp_path / "real" / "c")
    with pytest.raises(CheckpointError, match=r"previous checkpoint is valid: load .*real/c\.previous"):
        read_checkpoint(link)
    with pytest.warns(RuntimeWarning, match=r"going back to .*real/c\.previous"):
        assert read_newest(link) == {"version": 1}


@pytest.mark.parametrize("name", ["c", "c.previous"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)])
def test_only_regular_files_are_replaced(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    if name == "c.previous":
        write_checkpoint(tmp_path / "c", {"version": 0})
    make(tmp_path / name)
    before = {file.name: file.lstat() for file in tmp_path.iterdir()}
    with pytest.raises(
        CheckpointError, match=rf"^cannot write checkpoint .*{name} exists and is not a regular file; .*$"
    ):
        write_checkpoint(tmp_path / "c", {"version": 1})
    assert {file.name: file.lstat() for file in tmp_path.iterdir()} == before


def test_link_to_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "c").symlink_to("pipe")
    with pytest.raises(CheckpointError, match=r"pipe exists and is not a regular file"):
        write_checkpoint(tmp_path / "c", {})
    assert (tmp_path / "c").is_symlink()
    assert (tmp_path / "pipe").is_fifo()


def test_previous_is_copied_where_hard_links_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    for version in range(3):
        write_checkpoint(tmp_path / "c", {"version": version})
    assert read_checkpoint(tmp_path / "c.previous") == {"version": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "c.previous"]


def test_partial_files_of_killed_writers_are_removed_and_others_kept(tmp_path: Path) -> None:
    ours, others = tmp_path / ".c[1].0123abcd.partial", tmp_path / ".c1.0123abcd.partial"
    ours.write_bytes(b"half")
    others.write_bytes(b"half")
    write_checkpoint(tmp_path / "c[1]", {})
    assert not ours.exists()
    assert others.exists()


def test_full_disk_is_reported_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, SMALL)
    with (
        largest_file(100_000),
        pytest.raises(CheckpointError, match=r"^cannot write checkpoint .*: File too large; .*$"),
    ):
        write_checkpoint(path, {"big": torch.zeros(100_000)})
    assert_identical(read_checkpoint(path), SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("place", ["absent/c", "file/c", "."])
def test_unwritable_path_is_reported_in_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^cannot write checkpoint [^\n]+$"):
        write_checkpoint(tmp_path / place, {})


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"sha256") + 20] ^= 1
    path.write_bytes(data)


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, SMALL)
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(CheckpointError, match=str(path)):
                read_checkpoint(path)


def test_every_truncation_and_extension_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, SMALL)
    good = path.read_bytes()
    for bad in [good[:length] for length in range(len(good))] + [good + b"\0", good + good]:
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=str(path)):
            read_checkpoint(path)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_replaced_bytes_never_change_the_state_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "c"
    write_checkpoint(path, SMALL)
    bad = bytearray(path.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(bad) - 1), min_size=1, max_size=4)):
        bad[position] = data.draw(st.integers(0, 255))
    path.write_bytes(bad)
    try:
        found = read_checkpoint(path)
    except CheckpointError:
        return
    assert_identical(found, SMALL)


@pytest.mark.parametrize("content", [b"", b"hello\n" * 50, pickle.dumps([1, 2])], ids=["empty", "text", "pickle"])
def test_other_file_formats_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        read_checkpoint(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "spcl-checkpoint"}])
def test_other_safetensors_files_are_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "c", metadata=metadata)
    with pytest.raises(CheckpointError, match="not an spcl checkpoint"):
        read_checkpoint(tmp_path / "c")


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path)


def test_other_versions_are_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 2)
        write_checkpoint(tmp_path / "c", SMALL)
    with pytest.raises(CheckpointError, match=r"has version 2 .* reads version 1; use the spcl version that wrote it"):
        read_checkpoint(tmp_path / "c")


def test_error_says_whether_the_previous_checkpoint_is_valid(tmp_path: Path) -> None:
    path, previous = tmp_path / "c", tmp_path / "c.previous"
    write_checkpoint(path, {"version": 1})
    damage(path)
    with pytest.raises(CheckpointError, match=r"c is damaged: .*checksum; there is no .*c\.previous to go back to"):
        read_checkpoint(path)
    write_checkpoint(previous, {"version": 0})
    with pytest.raises(CheckpointError, match=r"previous checkpoint is valid: load .*c\.previous, or copy it to .*c$"):
        read_checkpoint(path)
    damage(previous)
    with pytest.raises(CheckpointError, match=r"nor can the previous checkpoint be used: .*c\.previous is damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize("harm", [damage, Path.unlink])
def test_newest_valid_checkpoint_is_read_with_a_warning(tmp_path: Path, harm: Any) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, {"version": 1})
    write_checkpoint(path, {"version": 2})
    assert read_newest(path) == {"version": 2}
    harm(path)
    with pytest.warns(RuntimeWarning, match=r"c (is damaged|does not exist).*; going back to .*c\.previous"):
        assert read_newest(path) == {"version": 1}
    damage(tmp_path / "c.previous")
    with pytest.raises(CheckpointError, match="nor can the previous checkpoint be used"):
        read_newest(path)


def test_writing_over_a_damaged_checkpoint_makes_it_valid(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, {"version": 1})
    write_checkpoint(path, {"version": 2})
    damage(path)
    write_checkpoint(path, {"version": 3})
    assert read_newest(path) == {"version": 3}


@pytest.mark.parametrize(
    "structure",
    [
        "not JSON",
        "[1, 2]",
        "null",
        '{"w": {"$tensor": "absent"}}',
        '{"w": {"$tensor": ["w"]}}',
        '{"w": {"$float": "text"}}',
        '{"$five": 5}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_wrong_structure_with_a_right_checksum_is_refused(tmp_path: Path, structure: str) -> None:
    checkpoint._write_file(tmp_path / "c", structure, {"w": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"c (has a right checksum but wrong content|holds a \w+, but)"):
        read_checkpoint(tmp_path / "c")


def test_a_damaged_checkpoint_never_replaces_a_good_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for version in range(2):
        write_checkpoint(path, {"version": version})
    damage(path)
    with pytest.warns(RuntimeWarning, match="going back to"):
        assert read_newest(path) == {"version": 0}
    write_checkpoint(path, {"version": 2})  # a service that fell back has started and stopped once
    damage(path)
    with pytest.warns(RuntimeWarning, match="going back to"):
        assert read_newest(path) == {"version": 0}


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_several_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "c"
    for version in range(6):
        write_checkpoint(path, {"version": version}, keep=keep)
    names = ["c", "c.previous", "c.previous-2", "c.previous-3"][:keep]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [read_checkpoint(tmp_path / name)["version"] for name in names] == [5, 4, 3, 2][:keep]
    for age, name in enumerate(names[:-1]):
        damage(tmp_path / name)
        with pytest.warns(RuntimeWarning, match=rf"going back to .*{names[age + 1]}$"):
            assert read_newest(path) == {"version": 4 - age}
    write_checkpoint(path, {"version": 6}, keep=keep)
    assert read_checkpoint(path) == {"version": 6}
    assert read_checkpoint(tmp_path / names[-1])["version"] == (6 if keep == 1 else 6 - keep)
    write_checkpoint(path, {"version": 7}, keep=1)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_checkpoints_of_another_process_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "c", list[str]()

    def open_and_note(path: Path, framework: str) -> Any:
        read.append(path.name)
        return safe_open(path, framework)

    for version in range(2):
        write_checkpoint(path, {"version": version}, keep=3)
    monkeypatch.setattr(checkpoint, "_KNOWN", deque())
    monkeypatch.setattr(checkpoint, "safe_open", open_and_note)
    for version in range(2, 5):
        write_checkpoint(path, {"version": version}, keep=3)
    assert read == ["c", "c.previous"]


KILLS = 40
KILLER = """
    import os, random, signal, sys, time, torch
    from pathlib import Path
    from spcl.checkpoint import read_checkpoint, write_checkpoint

    def write_forever(path, version, done):
        while True:
            write_checkpoint(path, {"version": version, "block": torch.full((50_000,), version)})
            os.write(done, version.to_bytes(8, "little"))
            version += 1

    torch.set_num_threads(1)  # a forked child must not wait for its parent's threads
    path, kills = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(0)
    write_checkpoint(path, {"version": 0, "block": torch.zeros(50_000, dtype=torch.int64)})
    version = interrupted = 0
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            write_forever(path, version + 1, writer)
        os.close(writer)
        with open(reader, "rb") as pipe:
            reported = pipe.read(8)
            time.sleep(random.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reported += pipe.read()
        returned = int.from_bytes(reported[-8:], "little")
        interrupted += any(file.suffix == ".partial" for file in path.parent.iterdir())
        state = read_checkpoint(path)
        version = state["version"]
        assert version in (returned, returned + 1), (version, returned)
        assert (state["block"] == version).all()
    write_checkpoint(path, {"version": version})
    print(interrupted, version)
"""


def test_killed_writers_leave_the_last_complete_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLER), str(tmp_path / "c"), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    interrupted, versions = map(int, done.stdout.split())
    assert interrupted > 0, "no writer was killed while it wrote"
    assert versions >= KILLS
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "c.previous"]


def test_tensors_have_the_names_of_their_keys(tmp_path: Path) -> None:
    one, two, three = (torch.full((2,), float(number)) for number in range(3))
    state = {"a": {"b": one}, "a.b": two, "list": [three, {"__metadata__": one}], "__metadata__": two}
    write_checkpoint(tmp_path / "c", state)
    from safetensors.torch import load_file

    assert sorted(load_file(tmp_path / "c")) == ["__metadata___", "a.b", "a.b_", "list.0", "list.1.__metadata__"]
    read = read_checkpoint(tmp_path / "c")
    assert torch.equal(read["a"]["b"], one)
    assert torch.equal(read["a.b"], two)
    assert torch.equal(read["list"][0], three)
    assert torch.equal(read["__metadata__"], two)
