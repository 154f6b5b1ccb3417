"""The state folder of a service: who uses it, requests to start and finish tasks, the learner, and its checkpoints."""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from spcl._util.files import locked, read_json, remove_partial_files, user_errors, write_json
from spcl._util.registry import Named
from spcl._util.validation import DICTS, check_content, tagged
from spcl.checkpoint import checked_content, has_checkpoint, read_newest
from spcl.errors import CheckpointError, DataError, SpclError
from spcl.learner import Learner
from spcl.learner.state import TRAINING
from spcl.memory import Memory
from spcl.methods import Method, recorded_settings
from spcl.models import InputSpec
from spcl.options import CHANGEABLE, LEARNER, SPEED
from spcl.plugins import load_recorded_plugins
from spcl.runs import RunSettings, resolve_settings
from spcl.runs.build import learner_options, learner_parts, make_heads, make_losses, pick_device
from spcl.runs.trained import TrainedRun
from spcl.serve.settings import InputSettings, ServeSettings
from spcl.sources import Announcement, Data, Entry, FolderHub, check_task_name
from spcl.sources.wire import MAX_BYTES, announcement_from_json, announcement_to_json
from spcl.streams import LiveStream
from spcl.tasks import Kind, TaskDescription

CHECKPOINT = "learner.safetensors"

# -- one service per folder


class StateInUseError(SpclError):
    """A state folder that another service uses."""


@contextmanager
def held_state(folder: Path, wait: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Hold the folder within the block; yield whether it is held.

    The operating system lets go of it when the process ends, in whatever way.

    Args:
        folder: made if it does not exist.
        wait: called again and again while another service holds the folder; returns whether to wait longer. Without it,
            a folder in use raises a :class:`StateInUseError`.
    """
    with ExitStack() as stack:
        with user_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # it holds what was learned of the data: for the service's user alone
            held = stack.enter_context(locked(folder / "lock", wait))
            if held:
                remove_partial_files(folder)
                write_json(folder / "owner.json", {"host": socket.gethostname(), "process": os.getpid()})
        if not held and wait is None:
            raise StateInUseError(
                f"the state {folder} is in use by {_owner(folder)}; stop that, or choose another state"
            )
        yield held


def _owner(folder: Path) -> str:
    known = read_json(folder / "owner.json")
    return f"process {known['process']} on {known['host']}" if isinstance(known, dict) else "another service"


# -- requests

STREAM = "requests"
MOST_REQUESTS = 1000  # that are read at once


@dataclass(frozen=True)
class TaskRequest:
    """A request to start or to finish a source.

    Attributes:
        do: what is requested.
        task: the source's name.
        announced: what a source that starts answers.

    >>> TaskRequest.parsed(b'{"do": "finish", "task": "camera"}')
    TaskRequest(do='finish', task='camera', announced=None)
    >>> TaskRequest.parsed(b'{"do": "finish"}')
    Traceback (most recent call last):
    ...
    spcl.errors.TaskError: a task cannot be named None; take up to 100 letters, digits, '_', '-' and '.', which is not
    the first, of at most 200 bytes
    """

    do: Literal["start", "finish"]
    task: str
    announced: Announcement | None = None

    @classmethod
    def parsed(cls, data: Data | DataError) -> "TaskRequest":
        """Return the request in a file, or raise an error that says why it is not one."""
        if isinstance(data, DataError):
            raise data
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the request is not JSON: {error!s:.200}") from None
        if not isinstance(values, dict) or values.get("do") not in ("start", "finish"):
            raise DataError(f"the request is {values!r:.120}; ask to start or to finish a task")
        name = check_task_name(values.get("task"))
        announced = announcement_from_json(name, values.get("schema")) if values["do"] == "start" else None
        return cls(values["do"], name, announced)

    @property
    def key(self) -> tuple[str, str]:
        """The kind of request and the source."""
        return self.do, self.task

    def encoded(self) -> bytes:
        """Return the request as JSON."""
        values: dict[str, Any] = {"do": self.do, "task": self.task}
        if self.announced is not None:
            values["schema"] = announcement_to_json(self.announced)
        return json.dumps(values).encode()


class Requests:
    """Requests on disk, each carried out once: the position of the last one is in the checkpoint.

    Args:
        folder: of the service's state.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "requests"
        self._hub = FolderHub(self._path)

    def add(self, request: TaskRequest) -> None:
        """Keep a request."""
        self._hub.append(STREAM, request.encoded())

    def after(self, position: str | None) -> list[Entry]:
        """Return up to 1,000 requests after a position, each with its own position, as they are stored."""
        hub = FolderHub(self._path)  # a new one: the listing of an old one may be half a second old
        return list(hub.read({STREAM: position}, MOST_REQUESTS, wait=0.0, max_bytes=MAX_BYTES)[STREAM])

    def put_aside(self, position: str, data: Data | DataError, reason: str) -> None:
        """Keep a request that cannot be carried out, with the reason, in ``requests/dead-letters``."""
        self._hub.dead_letter(STREAM, position, b"" if isinstance(data, DataError) else bytes(data), reason)

    def forget(self, upto: str) -> None:
        """Delete requests that are in all kept checkpoints."""
        self._hub.trim(STREAM, upto)


# -- what is in a checkpoint beside the learner and the positions


@dataclass
class TaskRecord:
    """A source.

    Attributes:
        name: its name.
        schema: what its task predicts; None while it is not known.
        task: the name of its task: its own, unless it is announced or configured for another one.
        encoder: the name of its encoder, or its name and options; None for none.
        finished: whether it has ended.
        may_return: whether a new announcement lets it return once it has ended: it ended itself, or else the hub has
            deleted its stream.
        batches: how many were learned.
        samples: how many were learned.
        skipped: how many batches were skipped, because loss or gradient were not finite.
        dead_letters: how many messages could not be learned.
        late: how many messages were not learned because it had ended.
    """

    name: str
    schema: TaskDescription | None = None
    task: str = ""
    encoder: Named | None = None
    finished: bool = False
    may_return: bool = False
    batches: int = 0
    samples: int = 0
    skipped: int = 0
    dead_letters: int = 0
    late: int = 0

    def __post_init__(self) -> None:
        self.task = self.task or self.name

    @property
    def announced(self) -> Announcement:
        """What the source answers, once that is known."""
        assert self.schema is not None
        return Announcement(self.name, self.schema, self.encoder)

    def settle(self, schema: TaskDescription | None, encoder: Named | None) -> None:
        """Note what the source answers."""
        self.schema, self.encoder = schema, encoder
        self.task = self.task if schema is None else schema.name

    def state_dict(self) -> dict[str, Any]:
        """Return the source as plain data."""
        own = None if self.schema is None else Announcement(self.schema.name, self.schema)
        return vars(self) | {"schema": None if own is None else announcement_to_json(own)}


TASK_CONTENT: Mapping[str, Any] = {
    "name": str,
    "schema": dict | None,
    "task": str,
    "encoder": str | dict | None,
    "finished": bool,
    "may_return": bool,
    **dict.fromkeys(("batches", "samples", "skipped", "dead_letters", "late"), int),
}


@dataclass
class Records:
    """All sources by name, and how far requests are carried out.

    Attributes:
        tasks: the sources, in the order in which they were seen.
        request: the position of the last request that was carried out; None before the first.
        learner: the settings that the learner was made with.
        inputs: shape and type of the samples, as plain data; empty in states of earlier versions.
    """

    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    request: str | None = None
    learner: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def described(self) -> dict[str, TaskDescription]:
        """What the tasks predict that sources answer, by name, as far as it is known."""
        found: dict[str, TaskDescription] = {}
        for record in list(self.tasks.values()):
            if record.schema is not None:
                found.setdefault(record.task, record.schema)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the records as plain data."""
        tasks = [task.state_dict() for task in list(self.tasks.values())]
        return {"tasks": tasks, "request": self.request, "learner": self.learner, "inputs": self.inputs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        check_content("the service", state, {"tasks": DICTS, "request": str | None, "learner": dict})
        check_content("the settings of the learner", state["learner"], {"method": dict})
        for saved in state["tasks"]:
            before = {"task": saved["name"], "encoder": None, "may_return": False}  # of earlier versions
            record = before | saved
            check_content("a task of the service", record, TASK_CONTENT)
            if record["name"] in self.tasks:
                raise CheckpointError(f"task {record['name']!r} is twice in the checkpoint; use another checkpoint")
            schema = _restored(record["task"], record["schema"])
            self.tasks[record["name"]] = TaskRecord(**record | {"schema": schema})
        self.request = state["request"]
        self.learner = state["learner"]
        self.inputs = state.get("inputs", {})


def _restored(name: str, values: dict[str, Any] | None) -> TaskDescription | None:
    """Return the schema of a checkpoint without checks: what was valid when the task started stays so."""
    if values is None:
        return None
    check_content(f"the schema of task {name!r}", values, {"kind": str, "classes": int | list[str]})
    kind, classes = values["kind"], values["classes"]
    if kind not in get_args(Kind) or not classes:
        raise CheckpointError(
            f"task {name!r} is a {kind!r:.80} with {classes!r:.80} classes in the checkpoint; use another checkpoint"
        )
    if isinstance(classes, int):
        return TaskDescription(name, kind, classes)
    return TaskDescription(name, kind, len(classes), class_names=tuple(classes))


# -- the learner


def new_learner(settings: RunSettings, inputs: InputSettings, records: Records) -> Learner:
    """Return a learner without tasks; its settings are recorded."""
    torch.manual_seed(settings.seed)
    records.learner, records.inputs = _identity(settings), inputs.spec().state_dict()
    parts = learner_parts(settings, [inputs.spec()], pick_device(settings.device), steps=1)
    return Learner(**parts, **learner_options(settings))


CHANGEABLE_SETTINGS = tagged(RunSettings, CHANGEABLE)
"""The settings of the learner that a service may start with while its state has others."""


class Loaded(NamedTuple):
    """A learner of a checkpoint, and how its settings have changed since, in words."""

    learner: Learner
    changes: list[str]


def load_learner(path: Path, service: ServeSettings, records: Records, stream: LiveStream) -> Loaded:
    """Return the learner of the newest checkpoint that is valid, and restore records and stream with it.

    Changes of the settings in ``CHANGEABLE_SETTINGS`` are made; others are refused. A memory that the settings do not
    name stays what it was, as earlier versions had another default.
    """
    state, inputs = _read_state(path, records), service.inputs
    settings = service.run_settings(records.learner.get("memory", "balanced"))
    with checked_content(path):
        before, now = _recorded(records.learner), _identity(settings)
        changed = {name for name, value in now.items() if name in before and before[name] != value}
        _check_changes(path, changed, before, now)
        _check_inputs(path, state["tasks"], inputs)
        added = {entry["name"] for entry in state["tasks"]}
    as_saved = settings.model_copy(update={"memory_budget": before.get("memory_budget", settings.memory_budget)})
    parts = learner_parts(as_saved, [inputs.spec()], pick_device(settings.device), steps=1)
    if "method" in changed:
        state = _with_method(path, state, parts["method"], parts["memory"], inputs)
    tasks = [task for name, task in records.described.items() if name in added]
    heads = make_heads(tasks, parts["backbone"], settings)
    losses = make_losses(tasks, settings)
    try:
        learner = Learner.load(state, **parts, heads=heads, losses=losses, stream=stream)
    except CheckpointError as error:
        if "method" not in changed:
            raise
        raise CheckpointError(f"the learner in {path} does not fit another method ({error}); {PUT_BACK}") from error
    if "learning_rate" in changed:
        for group in learner.optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group.pop("initial_lr", None)  # of a schedule
    if "memory_budget" in changed and learner.memory is not None:
        learner.memory.resize(settings.memory_budget)
    records.learner, records.inputs = now, inputs.spec().state_dict()
    return Loaded(learner, [text for name in sorted(changed) for text in _changes(name, before[name], now[name])])


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """Say what a setting was and is; of a method that is the same, the settings of its own that have changed.

    >>> _changes("method", {"name": "er", "alpha": 0.0, "layers": "all"}, {"name": "er", "alpha": 0.1, "layers": "all"})
    ['method.alpha from 0.0 to 0.1']
    """
    if name != "method":
        return [f"{name} from {before} to {now}"]
    if before["name"] != now["name"]:
        return [f"method from {before['name']} to {now['name']}"]
    return [
        f"method.{each} from {before.get(each)} to {now.get(each)}"
        for each in sorted(before.keys() | now.keys())
        if before.get(each) != now.get(each)
    ]


def _read_state(path: Path, records: Records) -> dict[str, Any]:
    """Return the newest checkpoint that is valid, and restore the records with it."""
    state = read_newest(path)
    with checked_content(path):
        if "service" not in state.get("sources", {}):
            raise CheckpointError(f"{path} is no checkpoint of a service; choose another state folder")
        records.load_state_dict(state["sources"]["service"])
        _check_tasks(state, records)
    return state


def _check_tasks(state: Mapping[str, Any], records: Records) -> None:
    """Raise an error unless the service has a record of all that learner and stream have, which fits."""
    check_content("the state", state, {"tasks": DICTS})
    check_content("the sources", state["sources"], {"stream": dict})
    stream = state["sources"]["stream"]
    check_content("the stream", stream, {"delivered": dict, "ended": list})
    for name in (*stream["delivered"], *stream["ended"]):
        if name not in records.tasks:
            raise CheckpointError(
                f"the stream has a task {name!r:.80} that the service has not; use another checkpoint"
            )
    described = records.described
    for entry in state["tasks"]:
        check_content("a task of the learner", entry, {"name": str, "classes": int | None, "head": dict | None})
        schema = described.get(entry["name"])
        if schema is None:
            raise CheckpointError(f"the service has no schema of task {entry['name']!r:.80}; use another checkpoint")
        classes = schema.classes if schema.kind == "classification" else None
        numbers = sum(each.numel() for each in (entry["head"] or {}).values())
        if classes != entry["classes"] or (classes is None and schema.classes > numbers):
            raise CheckpointError(
                f"task {schema.name!r} has {schema} in the service, but {entry['classes']} classes and a head of "
                f"{numbers} parameters in the learner; use another checkpoint"
            )
    for entry in state.get("task_sources", []):
        check_content("a source of the learner", entry, {"name": str, "task": str, "implied": bool})
        record = records.tasks.get(entry["name"])
        if not entry["implied"] and (record is None or record.task != entry["task"]):
            raise CheckpointError(
                f"source {entry['name']!r:.80} answers task {entry['task']!r:.80} in the learner, but not in the "
                f"service; use another checkpoint"
            )


def _identity(settings: RunSettings) -> dict[str, Any]:
    """Return the settings that make the learner, as the state records them."""
    fixed = {*tagged(RunSettings, LEARNER)}.difference(tagged(RunSettings, SPEED))
    return settings.model_dump(mode="json", include=fixed)


PUT_BACK = "put the setting back, or choose another state folder"


def _recorded(learner: dict[str, Any]) -> dict[str, Any]:
    return {**learner, "method": recorded_settings(learner["method"])}


def _check_changes(path: Path, changed: Iterable[str], before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise if a setting has changed that decides what the learner is."""
    for name in sorted(changed):
        changeable = name in CHANGEABLE_SETTINGS
        if not changeable or (name == "memory_budget" and not (before[name] and now[name])):
            advice = "a memory is neither added nor removed" if changeable else "it decides what the learner is"
            raise CheckpointError(
                f"the learner in {path} has {name} = {before[name]!r}, and the settings say {now[name]!r} ({advice}); "
                f"{PUT_BACK}"
            )


def _with_method(
    path: Path, state: dict[str, Any], method: Method, memory: Memory | None, inputs: InputSettings
) -> dict[str, Any]:
    """Return the state of a learner for another method, or the same one with other settings; keep its memory."""
    if memory is not None:
        dtype = state["memory"]["dtype"]
        memory.dtype = None if dtype is None else getattr(torch, dtype)
        if method.edits_memory and dtype is None and not inputs.spec().dtype.is_floating_point:
            raise CheckpointError(
                f"method {method.name!r} edits samples of memory, but the memory in {path} holds "
                f"{inputs.description()}; {PUT_BACK}"
            )
    if method.name == state["method"]["name"]:
        return state
    new = {"name": method.name, "settings": {}, "state": method.state_dict()}
    return {name: value for name, value in state.items() if name != "engine"} | {"method": new}


def _check_inputs(path: Path, tasks: list[dict[str, Any]], inputs: InputSettings) -> None:
    """Raise if the configured inputs differ from the inputs that the learner was trained with."""
    now = inputs.description()
    for task in tasks:
        if task["signature"] is not None and task["signature"][0] != now:
            raise CheckpointError(
                f"task {task['name']!r} of the learner in {path} has samples of {task['signature'][0]}, and the "
                f"settings say inputs of {now}; {PUT_BACK}"
            )


# -- the model, for other programs


def holds_model(folder: Path) -> bool:
    """Return whether a folder is the state of a service that has saved a checkpoint."""
    return has_checkpoint(folder / CHECKPOINT)


def read_model(folder: str | Path, plugins: Sequence[str] = ()) -> TrainedRun:
    """Read the model of a service from its state; the service may be at work meanwhile.

    Args:
        folder: the state.
        plugins: where the plug-ins of the service are now, if they were moved or changed.

    Raises:
        CheckpointError: if no checkpoint is valid, or an earlier version wrote it.
        PluginError: if a plug-in is missing or has changed.
    """
    path, records = Path(folder).expanduser() / CHECKPOINT, Records()
    state = _read_state(path, records)
    if not records.inputs:
        raise CheckpointError(
            f"an earlier version wrote {path}, which does not say what the inputs are; start the service once with "
            f"this version"
        )
    with checked_content(path):
        learner = _recorded(records.learner)
        if not plugins:
            load_recorded_plugins(learner.get("plugins", ()), path)
        settings = resolve_settings(learner | ({"plugins": list(plugins)} if plugins else {}))
        added = {entry["name"] for entry in state["tasks"]}
        tasks = {name: task for name, task in records.described.items() if name in added}
        inputs = dict.fromkeys(tasks, InputSpec.from_state_dict(records.inputs))
    if not tasks:
        raise CheckpointError(f"the learner in {path} has no task yet; wait until the service has learned a batch")
    model = {name: value for name, value in state.items() if name not in TRAINING}
    return TrainedRun(path.parent, settings, None, tasks, inputs, model)


# -- checkpoints

RETRY_SECONDS = 10.0  # the longest time after which saving is tried again


@dataclass(frozen=True)
class Held:
    """What a checkpoint holds.

    Attributes:
        positions: how far the messages of tasks were learned.
        finished: the sources that have ended, and how far they were read.
        request: the position of the last request that was carried out.
    """

    positions: dict[str, str]
    finished: dict[str, str | None]
    request: str | None


class Checkpoints:
    """When to save, and what all kept checkpoints hold, so that the hub may forget it.

    Args:
        keep: how many checkpoints are kept, at least 2.
        seconds: between two checkpoints.

    Attributes:
        saved_at: when the last one was saved (``time.time()``); None before.
        failures: how many could not be saved.
        unsaved_since: when the first change happened that is in no checkpoint (``time.monotonic()``); None without one.
        is_failing: whether the last one could not be saved.
        overdue_since: since when one should be saved and is not (``time.monotonic()``); None while none should be.

    >>> checkpoints = Checkpoints(keep=2, seconds=0.0)
    >>> [checkpoints.note_saved(Held({}, {name: None}, None)) for name in "abc"]
    [None, Held(positions={}, finished={'a': None}, request=None),
    Held(positions={}, finished={'b': None}, request=None)]
    """

    def __init__(self, keep: int, seconds: float) -> None:
        self.saved_at: float | None = None
        self.failures = 0
        self.is_failing = False
        self.unsaved_since: float | None = None
        self.overdue_since: float | None = None
        self._keep = keep
        self._seconds = seconds
        self._missing = 0  # checkpoints until all that are kept hold everything
        self._due_at = time.monotonic() + seconds
        self._held: deque[Held] = deque()  # of the kept checkpoints but the oldest

    def load(self, held: Held, saved_at: float | None) -> None:
        """Go on after a checkpoint that was loaded."""
        self.saved_at = saved_at
        self._missing = self._keep - 1
        self._held.append(held)

    def change(self, *, at_once: bool = False) -> None:
        """Note that something happened that belongs into checkpoints."""
        self._missing = self._keep
        self.unsaved_since = self.unsaved_since or time.monotonic()
        if at_once:
            self._due_at = 0.0

    def is_due(self) -> bool:
        """Return whether a checkpoint is to be saved now."""
        now = time.monotonic()
        is_due = self._missing > 0 and now >= self._due_at
        if is_due:
            self.overdue_since = self.overdue_since or now
        return is_due

    def note_failure(self) -> bool:
        """Note that a checkpoint could not be saved: a full disk may have space later; return whether it is news."""
        is_news, self.is_failing = not self.is_failing, True
        self.failures += 1
        self._due_at = time.monotonic() + min(max(self._seconds, 1.0), RETRY_SECONDS)
        return is_news

    def note_saved(self, held: Held) -> Held | None:
        """Note that a checkpoint was saved; return what all kept ones hold now, if that is more than before.

        ``held.positions`` belong to the checkpoint before, as :meth:`spcl.streams.LiveStream.commit` gives them.
        """
        self.saved_at, self.unsaved_since, self.overdue_since = time.time(), None, None
        self._missing, self.is_failing = max(0, self._missing - 1), False
        self._due_at = time.monotonic() + self._seconds
        if self._held:
            self._held[-1].positions.update(held.positions)
        self._held.append(Held({}, held.finished, held.request))
        return self._held.popleft() if len(self._held) == self._keep else None
