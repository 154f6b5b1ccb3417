"""A service learns what its sources send, puts away what it cannot learn, and goes on where it was."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from list_hub import ListHub, batch, damaged
from redis_process import RedisProcess, needs_redis
from serving import HUB, knows, list_of_tests, publish, running, settings_of, task, until
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.errors import CheckpointError, DataError, SpclError, TaskError
from spcl.models import BACKBONES
from spcl.serve import (
    CheckpointEvent,
    DeadLetterEvent,
    ServeSettings,
    Service,
    StepEvent,
    TaskEvent,
    load_serve_settings,
)
from spcl.serve.history import Totals
from spcl.serve.lock import StateInUseError
from spcl.serve.metrics import Metrics
from spcl.sources import Entry, Publisher, RedisHub, Schema, decode


@BACKBONES.register("picky-of-tests")
def picky_of_tests(inputs: Any) -> nn.Module:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x == 13).any():
                raise ValueError("13 is not for me")
            return self.layer(x)

    return Picky()


@pytest.fixture
def hub(tmp_path: Path) -> ListHub:
    return list_of_tests(str(tmp_path))


class CountingRedisHub(RedisHub):
    """Redis, and how many messages of every task were read; what is in its dead letters."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(url, prefix)
        self.furthest: Counter[str] = Counter()

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int
    ) -> dict[str, Sequence[Entry]]:
        found = super().read(after, count, wait, max_bytes)
        self.furthest.update({task: len(entries) for task, entries in found.items()})
        return found

    @property
    def dead(self) -> dict[str, Any]:
        return {"a": self._client.xrange(self._key("dead", "a"))}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["list", pytest.param("redis", marks=needs_redis)])
def any_hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The hub in memory, and a real broker."""
    if request.param == "list":
        yield list_of_tests(str(tmp_path))
        return
    server = request.getfixturevalue("redis_server")
    with server.unused_at_the_end(), closing(CountingRedisHub(server.url, prefix=tmp_path.name)) as hub:
        HUB[str(tmp_path)] = hub
        yield hub


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ServeSettings]:
    return partial(settings_of, tmp_path)


def saved(settings: ServeSettings) -> dict[str, Any]:
    return read_checkpoint(settings.state / "learner.safetensors")


def test_a_service_learns_tasks_and_reports(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publisher = publish(hub, "a", 10)
    publish(hub, "b", 4).end("b")
    publisher.start("speed", kind="regression")
    publisher.publish("speed", torch.zeros(5, 3), torch.zeros(5))
    with running(make(), make_predictor=lambda learner: learner.steps) as (service, events):
        until(lambda: service.status().samples == 33)
        until(lambda: task(service, "b").state == "finished" and service.predictor == service.status().steps)
        until(lambda: hub.tasks() == ["a", "speed"] and hub.backlog("a", None) == 1)  # two checkpoints have the rest
        assert [(each.name, each.kind, each.classes, each.batches) for each in service.status().tasks] == [
            ("a", "classification", 2, 10),
            ("b", "classification", 2, 4),
            ("speed", "regression", 1, 1),
        ]
        assert (task(service).state, task(service).backlog, task(service).dead_letters) == ("running", 0, 0)
    assert hub.closed == 1
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [event.step for event in steps] == list(range(len(steps)))
    assert sum(sum(event.samples.values()) for event in steps) == 33
    kinds = [(event.task, event.kind) for event in events if isinstance(event, TaskEvent)]
    assert sorted(kinds) == [("a", "started"), ("b", "ended"), ("b", "started"), ("speed", "started")]
    assert any(isinstance(event, CheckpointEvent) and event.bytes > 0 for event in events)


@pytest.mark.filterwarnings("ignore")
def test_a_thousand_damaged_messages_are_learned_or_put_away(any_hub: Any, make: Callable[..., ServeSettings]) -> None:
    known = Schema.of(classes=2)
    Publisher(any_hub).start("a", classes=2)
    announcements = 0
    for data in damaged(1000, seed=0, ends=False):
        any_hub.append("a", data)
        with suppress(DataError):
            announcements += decode(data).content == "start" and decode(data).schema == known
    publish(any_hub, "b", 5)

    def handled(service: Service) -> int:
        return task(service).batches + task(service).dead_letters + announcements

    settings = make(max_bytes=1500)
    with running(settings) as (service, _):
        until(lambda: knows(service, "a") and handled(service) > 300)
    with running(settings) as (service, events):  # goes on after the same messages
        until(lambda: knows(service, "a") and handled(service) == 1000 and task(service, "b").batches == 5)
        assert task(service).batches > 10
        assert len(any_hub.dead["a"]) == task(service).dead_letters > 500
    assert all(event.reason for event in events if isinstance(event, DeadLetterEvent))


@pytest.mark.filterwarnings("ignore:task 'a'")
def test_a_source_of_nan_is_skipped_and_the_others_learn(any_hub: Any, make: Callable[..., ServeSettings]) -> None:
    publisher = publish(any_hub, "a", 0)
    for _ in range(6):
        publisher.publish("a", torch.full((2, 3), math.nan), torch.tensor([0, 1]))
    publish(any_hub, "b", 6)
    settings = make(together=True)
    with running(settings) as (service, events):
        until(lambda: service.status().steps == 6)
    assert [event.skipped for event in events if isinstance(event, StepEvent)] == [("a",)] * 6
    assert all(tensor.isfinite().all() for tensor in saved(settings)["backbone"].values())


def test_a_batch_that_breaks_the_step_is_put_away_alone(
    hub: ListHub, make: Callable[..., ServeSettings], caplog: pytest.LogCaptureFixture
) -> None:
    publish(hub, "a", 5)
    publisher = publish(hub, "b", 2)
    publisher.publish("b", *batch(13))
    publisher.publish("b", *batch(13))
    publisher.publish("b", *batch(1))
    with running(make(together=True, learner={"backbone": "picky-of-tests"})) as (service, events):
        until(lambda: service.status().samples == 16)
        assert (task(service, "a").batches, task(service, "b").batches) == (5, 3)
    letters = [event for event in events if isinstance(event, DeadLetterEvent)]
    assert [(letter.task, letter.position) for letter in letters] == [("b", "4"), ("b", "5")]
    assert "13 is not for me" in letters[0].reason
    assert list(hub.dead["b"]) == ["4", "5"]
    (warning,) = [record for record in caplog.records if "was refused" in record.message]
    assert "task 'b'" in warning.message
    assert "13 is not for me" in warning.message


def test_a_stalled_source_does_not_delay_and_a_flood_stays_in_the_hub(
    any_hub: Any, make: Callable[..., ServeSettings]
) -> None:
    publish(any_hub, "stalled", 1)
    publish(any_hub, "flood", 150)
    with running(make()) as (service, _):
        while not knows(service, "flood") or task(service, "flood").batches < 150:
            time.sleep(0.002)
            learned = task(service, "flood").batches if knows(service, "flood") else 0
            read = any_hub.furthest.get("flood", 0)
            again = task(service, "flood").batches if knows(service, "flood") else 0
            assert read <= again + 1 + 4 + 1 + 8 + (again - learned) + 8  # announcement, queue, moment, read-ahead
        assert task(service, "stalled").batches == 1
        until(lambda: task(service, "stalled").lag_seconds > 0.2)


def test_silence_ends_a_task_but_an_outage_is_no_silence(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 3)
    with running(make(tasks={"end": "silence", "silence_seconds": 0.5})) as (service, events):
        until(lambda: knows(service, "a") and task(service).batches == 3)
        hub.is_down = True
        until(lambda: any(isinstance(event, TaskEvent) and event.kind == "failed" for event in events))
        time.sleep(1.7)
        assert task(service).state == "failed"
        hub.is_down = False
        until(lambda: task(service).state == "finished")
    kinds = [event.kind for event in events if isinstance(event, TaskEvent)]
    assert kinds == ["started", "failed", "recovered", "ended"]


def test_messages_after_the_end_of_a_task_are_counted(any_hub: Any, make: Callable[..., ServeSettings]) -> None:
    publish(any_hub, "a", 3).end("a")
    publish(any_hub, "a", 12, announce=False)  # more than are read along with the end
    publish(any_hub, "b", 4).end("b")
    settings = make()
    with running(settings) as (service, events):
        until(lambda: any_hub.tasks() == [])
        until(lambda: task(service, "a").late == 12)
        metrics = Metrics(Totals, service.status).text().decode()
    assert 'spcl_late_messages{task="a"} 12.0' in metrics
    assert 'spcl_late_messages{task="b"} 0.0' in metrics
    late = [event for event in events if isinstance(event, TaskEvent) and event.kind == "late"]
    assert [(event.task, event.text.split(";")[0]) for event in late] == [
        ("a", "12 of its messages were not learned, as it had ended")
    ]
    assert [each["late"] for each in saved(settings)["sources"]["service"]["tasks"]] == [12, 0]
    with running(settings) as (service, events):
        until(lambda: any(isinstance(event, CheckpointEvent) for event in events))
        assert (task(service, "a").batches, task(service, "a").late) == (3, 12)


def test_messages_that_a_request_to_finish_leaves_are_counted(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 3)
    with running(make(checkpoint_seconds=1.0)) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 3)
        service.finish_task("a")
        publish(hub, "a", 2, announce=False)
        until(lambda: hub.tasks() == [])
        until(lambda: task(service).batches + task(service).late == 5)


def test_a_second_instance_is_refused_and_a_standby_takes_over(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    settings = make()
    publish(hub, "a", 5)
    with running(settings) as (first, _):
        until(lambda: first.status().samples == 10)
        with pytest.raises(StateInUseError, match=r"is in use by process \d+ on"):
            Service(settings).run()
        with running(settings, standby=True) as (second, events):
            time.sleep(0.3)
            assert second.status().tasks == []
            first.stop()
            until(lambda: knows(second, "a"))
            publish(hub, "a", 2, announce=False)
            until(lambda: task(second).batches == 7)
            assert [event.step for event in events if isinstance(event, StepEvent)] == [5, 6]
    with running(settings) as (first, _):
        until(lambda: first.status().uptime > 0)
        with running(settings, standby=True):
            pass  # a standby that is stopped while it waits


def test_requests_are_carried_out_once_and_survive_a_restart(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    settings = make()
    publish(hub, "a", 3, announce=False)
    with running(settings) as (service, _):
        until(lambda: knows(service, "a") and task(service).state == "waiting")
        assert hub.backlog("a", None) == 3
        service.start_task("a", classes=["no", "yes"])
        until(lambda: task(service).batches == 3)
        with pytest.raises(TaskError, match="there is a task 'a' already, which is running"):
            service.start_task("a", classes=2)
        for wrong in ({"name": "b"}, {"name": "memory", "classes": 2}, {"name": "b", "classes": 0}):
            with pytest.raises(TaskError):
                service.start_task(**wrong)  # type: ignore[arg-type]
        with pytest.raises(TaskError, match="there is no running task 'b'"):
            service.finish_task("b")
        service.finish_task("a")
        service.start_task("c", classes=2)
        with pytest.raises(TaskError, match=r"there is a (request to start )?task 'c' already"):
            service.start_task("c", classes=3)
    with running(settings) as (service, _):
        until(lambda: knows(service, "c") and task(service).state == "finished")
        publish(hub, "c", 2, announce=False)
        until(lambda: task(service, "c").batches == 2)
        with pytest.raises(TaskError, match="which is finished"):
            service.start_task("a", classes=2)
    assert [each["finished"] for each in saved(settings)["tasks"]] == [True, False]
    with pytest.raises(SpclError, match="has not loaded its state yet"):
        Service(settings).start_task("d", classes=2)


def test_tasks_start_on_first_sight(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 2, announce=False)
    Publisher(hub).publish("number", torch.zeros(2, 3), torch.zeros(2, 4))
    hub.append("memory", b"a reserved name")
    with running(make(tasks={"start": "first-sight", "classes": 2})) as (service, events):
        until(lambda: knows(service, "a") and task(service).batches == 2)
        until(lambda: task(service, "number").dead_letters == 1)
        assert not knows(service, "memory")
    assert [event.task for event in events if isinstance(event, TaskEvent) and event.kind == "failed"] == ["memory"]
    with running(make(tasks={"start": "first-sight"}, state=f"{make().state}2")) as (service, _):
        until(lambda: knows(service, "number") and task(service, "number").batches == 1)
        assert (task(service, "number").kind, task(service, "number").classes) == ("regression", 4)
        until(lambda: task(service, "a").dead_letters >= 1)  # the first service let the hub forget


def test_the_checkpoint_before_is_used_when_the_last_is_damaged(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    settings = make(checkpoint_seconds=0.0)
    publish(hub, "a", 6)
    with running(settings) as (service, _):
        until(lambda: service.status().samples == 12)
    positions = saved(settings)["sources"]["stream"]["positions"]
    (settings.state / "learner.safetensors").write_bytes(b"damaged")
    publish(hub, "a", 1, announce=False)
    service = Service(settings, on_event=lambda _: service.stop() if service.status().samples == 14 else None)
    with pytest.warns(RuntimeWarning, match="going back to"):
        service.run()
    assert positions == {"a": "7"}
    assert saved(settings)["sources"]["stream"]["positions"] == {"a": "8"}


def test_another_learner_is_refused(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    with running(make()) as (service, _):
        until(lambda: service.status().uptime > 0)
    with pytest.raises(CheckpointError, match="has seed = 0, and the settings say 1; put the setting back"):
        Service(make(learner={"seed": 1})).run()


def test_a_learner_of_an_earlier_version_goes_on_with_the_settings_that_it_had(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    before = {"method": {"name": "spcl", "finished_weight": 1.0}, "scenario": "class"}
    with running(settings := make(learner=before)) as (service, _):
        until(lambda: service.status().uptime > 0)
    state = saved(settings)
    del state["sources"]["service"]["learner"]["method"]["finished_weight"]
    write_checkpoint(settings.state / "learner.safetensors", state)
    with running(make(learner=before)) as (service, _):
        until(lambda: service.status().uptime > 0)
    with pytest.raises(CheckpointError, match=r"has method = .*'finished_weight': 1\.0.* settings say .*0\.01"):
        Service(make(learner=before | {"method": "spcl"})).run()


def test_other_inputs_than_those_of_the_tasks_are_refused(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 1)
    with running(make()) as (service, _):
        until(lambda: service.status().steps == 1)
    words = r"task 'a' .* samples of float32\[3\], and the settings say inputs of float32\[4\]; put the setting back"
    with pytest.raises(CheckpointError, match=words):
        Service(make(inputs={"shape": [4]})).run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("state: s\nsource: folder\n", "inputs must be given"),
        ("state: s\nsource: folder\ninputs: {shapes: [3]}\n", "no setting 'shapes'; did you mean 'shape'"),
        ("state: s\nsource: folder\ninputs: {dtype: real}\n", "no type of a tensor"),
        ("state: s\nsource: folder\ninputs: {}\nlearner: {benchmark: x}\n", "learner: there is no setting 'benchmark'"),
        ("state: s\nsource: folder\ninputs: {}\ntasks: {start: now}\n", "start = 'now'"),
        ("state: s\nsource: folder\ninputs: {}\nhttp: {token: secret}\n", "no setting 'token'"),
    ],
)
def test_wrong_settings_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(SpclError, match=message):
        load_serve_settings(tmp_path / "serve.yaml")


def test_settings_are_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "state: s\nsource: {name: folder, path: in}\ninputs: {parts: {a: {shape: [2]}, b: {dtype: int64}}}\n"
    (tmp_path / "serve.yaml").write_text(f"{text}learner: {{method: er}}\nhttp: {{token_file: token}}\n")
    settings = load_serve_settings(tmp_path / "serve.yaml")
    assert (settings.state, settings.source) == (tmp_path / "s", {"name": "folder", "path": str(tmp_path / "in")})
    assert settings.run_settings().method["name"] == "er"
    assert {name: part.shape for name, part in (settings.inputs.spec().parts or {}).items()} == {"a": (2,), "b": ()}
    with pytest.raises(SpclError, match="the token cannot be read"):
        settings.http.token()
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(SpclError, match="holds no token"):
        settings.http.token()
    (tmp_path / "token").write_text("secret\n")
    assert settings.http.token() == "secret"
    monkeypatch.setenv("TOKEN", "other")
    assert settings.http.model_copy(update={"token_variable": "TOKEN"}).token() == "other"
