"""A service trains sources that share a task, each through its encoder."""

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from list_hub import ListHub
from redis_process import RedisProcess, needs_redis
from serving import (
    HUB,
    TOKEN,
    Client,
    http_settings,
    invoked,
    list_of_tests,
    run_in_thread,
    running,
    saved,
    settings_of,
    task,
    until,
)
from spcl.errors import SpclError, TaskError
from spcl.serve import DeadLetterEvent, TaskEvent
from spcl.serve.server import Server
from spcl.serve.state import Records, read_model
from spcl.sources import FolderHub, Hub, Publisher, RedisHub

ACTIVITIES = ["sit", "walk", "run"]
Y = torch.arange(6) % 3


def samples(seed: int, features: int = 3) -> Tensor:
    return torch.randn(6, features, generator=torch.Generator().manual_seed(seed))


def wear(hub: Hub, name: str, count: int = 3, features: int = 3, **said: Any) -> Publisher:
    """Publish batches of somebody who wears a watch."""
    publisher = Publisher(hub)
    publisher.start(name, **{"classes": ACTIVITIES, "task": "activity"} | said)
    for number in range(count):
        publisher.publish(name, samples(number, features), Y)
    return publisher


@pytest.fixture
def hub(tmp_path: Path) -> ListHub:
    return list_of_tests(str(tmp_path))


def test_sources_that_share_a_task_are_trained_through_their_encoders(hub: ListHub, tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        learner={"encoder": "affine"},
        sources={"watch-3": {"task": "activity"}, "watch-4": {"encoder": "affine"}},
    )
    wear(hub, "watch-1")
    wear(hub, "watch-2", encoder={"name": "affine"})
    wear(hub, "watch-3", task=None)
    wear(hub, "watch-4", task=None, classes=2, count=0)
    with running(settings) as (service, events):
        until(lambda: service.status().samples == 54)
        listed = {each.name: (each.task, each.encoder, each.classes) for each in service.status().tasks}
        service.finish_task("watch-1")
        until(lambda: task(service, "watch-1").state == "finished")
        assert task(service, "watch-2").state == "running"
    assert listed == {
        "watch-1": ("activity", "affine", 3),
        "watch-2": ("activity", {"name": "affine"}, 3),
        "watch-3": ("activity", "affine", 3),
        "watch-4": ("watch-4", "affine", 2),
    }
    started = {event.task: event.text for event in events if isinstance(event, TaskEvent) and event.kind == "started"}
    assert started["watch-1"] == "task 'activity' with 3 classes through the encoder 'affine'"
    learner = read_model(settings.state).learner("cpu")
    assert list(learner.tasks) == ["activity"]
    scales = [learner.sources[name].encoder.scale for name in ("watch-1", "watch-2", "watch-3")]  # type: ignore[union-attr]
    assert not torch.equal(scales[0], torch.ones(3))
    assert learner.sources["watch-1"].finished
    assert not learner.sources["watch-2"].finished


# -- coming back


@pytest.fixture(params=["list", "folder", pytest.param("redis", marks=needs_redis)])
def any_hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "list":
        yield list_of_tests(str(tmp_path))
    elif request.param == "folder":
        HUB[str(tmp_path)] = FolderHub(tmp_path / "hub")
        yield HUB[str(tmp_path)]
    else:
        with RedisProcess(tmp_path) as server, closing(RedisHub(server.url)) as hub:
            HUB[str(tmp_path)] = hub
            yield hub


def test_a_source_returns_by_a_new_announcement(any_hub: Any, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    publisher = wear(any_hub, "watch-1", encoder="affine")
    wear(any_hub, "watch-2")
    publisher.end("watch-1")
    publisher.publish("watch-1", samples(7), Y)  # after its end, and before it is announced again
    publisher.start("watch-1", classes=ACTIVITIES, task="activity")  # at once: the hub has not deleted its stream
    publisher.publish("watch-1", samples(8), Y)
    with running(settings) as (service, events):
        until(lambda: service.status().samples == 42)
        assert (task(service, "watch-1").state, task(service, "watch-1").late) == ("running", 1)
        publisher.end("watch-1")
        until(lambda: any_hub.tasks() == ["watch-2"])
        assert task(service, "watch-1").state == "finished"
        with pytest.raises(TaskError, match="has ended"):
            publisher.publish("watch-1", samples(9), Y)
        publisher.start("watch-1", classes=ACTIVITIES, task="activity", encoder="affine")
        publisher.publish("watch-1", samples(9), Y)
        until(lambda: service.status().samples == 48)
        assert task(service, "watch-1").batches == 5
    told = [event.kind for event in events if isinstance(event, TaskEvent) and event.task == "watch-1"]
    assert told == ["started", "ended", "started", "ended", "started"]
    with running(settings) as (service, _):  # a later process goes on with what the state says
        publisher.publish("watch-1", samples(1), Y)
        until(lambda: service.status().samples == 54)
        assert [each.state for each in service.status().tasks] == ["running", "running"]


def test_a_source_that_was_finished_by_request_returns_once_its_stream_is_deleted(any_hub: Any, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    publisher = wear(any_hub, "watch-1")
    with running(settings) as (service, _):
        until(lambda: service.status().samples == 18)
        service.finish_task("watch-1")
        until(lambda: any_hub.tasks() == [])
        until(lambda: saved(settings)["sources"]["service"]["tasks"][0]["may_return"])
    publisher.start("watch-1", classes=ACTIVITIES, task="activity")  # while the service is away
    publisher.publish("watch-1", samples(8), Y)
    with running(settings) as (service, _):
        until(lambda: service.status().samples == 24)
        assert (task(service, "watch-1").state, task(service, "watch-1").late) == ("running", 0)


def test_an_announcement_that_a_request_to_finish_left_unread_does_not_start_the_source(
    hub: ListHub, tmp_path: Path
) -> None:
    wear(hub, "watch-1", 3)
    with running(settings_of(tmp_path, checkpoint_seconds=0.3)) as (service, _):
        until(lambda: service.status().samples == 18)
        service.finish_task("watch-1")
        wear(hub, "watch-1", 2)  # such as of a publisher that starts anew
        until(lambda: hub.tasks() == [])
        until(lambda: task(service, "watch-1").late + task(service, "watch-1").batches >= 5)
        assert task(service, "watch-1").state == "finished"


def test_a_source_that_returns_is_learned_exactly_once_however_often_the_service_stops(tmp_path: Path) -> None:
    def learn(name: str, stops: bool) -> dict[str, Any]:
        folder = tmp_path / name
        hub = list_of_tests(str(folder))
        settings = settings_of(folder, learner={"encoder": "affine", "threads": 1}, checkpoint_seconds=0.0)
        for life in range(4):
            wear(hub, "watch-1", 2).end("watch-1")
            if stops:
                with running(settings) as (service, _):
                    until(lambda: service.status().samples >= 12 * life + 6)  # noqa: B023 - called at once
        with running(settings) as (service, _):
            until(lambda: service.status().samples == 48 and task(service, "watch-1").state == "finished")
            assert task(service, "watch-1").late == 0
        return saved(settings)

    one, other = learn("whole", False), learn("stopped", True)
    assert torch.equal(one["task_sources"][0]["encoder"]["scale"], other["task_sources"][0]["encoder"]["scale"])
    assert all(torch.equal(each, other["backbone"][name]) for name, each in one["backbone"].items())


def test_a_model_of_a_service_predicts_and_is_exported_for_a_source(hub: ListHub, tmp_path: Path) -> None:
    wear(hub, "watch-1", encoder="affine")
    wear(hub, "watch-2")
    settings = settings_of(tmp_path)
    with running(settings) as (service, _):
        until(lambda: service.status().samples == 36)
    learner, x = read_model(settings.state).learner("cpu"), samples(9)
    np.save(tmp_path / "x.npy", x.numpy())
    options = ("--format", "json", "--device", "cpu", "--source", "watch-1")
    rows = invoked("predict", settings.state, tmp_path / "x.npy", *options).stdout.splitlines()
    expected = learner.predict_proba(x, source="watch-1").max(dim=1)
    assert [json.loads(row)["probability"] for row in rows] == pytest.approx(expected.values.tolist())
    for whose in (("--source", "watch-1"), ("--task", "activity")):
        invoked("export", settings.state, *whose, "--out", tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2").module()
        asked = {"source": "watch-1"} if whose[0] == "--source" else {"task": "activity"}
        torch.testing.assert_close(program(x).softmax(dim=1), learner.predict_proba(x, **asked))


def test_a_source_that_does_not_fit_its_task_is_refused_and_the_others_are_learned(
    hub: ListHub, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path)
    wear(hub, "watch-1", count=1)
    with running(settings) as (service, _):
        until(lambda: service.status().samples == 6)
    wear(hub, "other-classes", classes=2)
    wear(hub, "other-kind", classes=None, kind="regression", count=0)
    wear(hub, "other-encoder", encoder="telescope")
    wear(hub, "watch-2")
    with running(settings) as (service, events):
        until(lambda: service.status().samples == 24 and sum(each.dead_letters for each in service.status().tasks) == 9)
        states = {each.name: (each.state, each.dead_letters) for each in service.status().tasks}
    assert states == {
        "watch-1": ("running", 0),
        "watch-2": ("running", 0),
        "other-classes": ("waiting", 4),
        "other-kind": ("waiting", 1),
        "other-encoder": ("waiting", 4),
    }
    reasons = {event.task: event.reason for event in events if isinstance(event, DeadLetterEvent)}
    assert "task 'activity' has 3 classes from others" in reasons["other-classes"]
    assert "task 'activity' has 3 classes from others" in reasons["other-kind"]
    assert "telescope" in reasons["other-encoder"]


def test_a_request_that_does_not_fit_the_task_is_put_aside(hub: ListHub, tmp_path: Path) -> None:
    wear(hub, "watch-1", count=1)
    with running(settings_of(tmp_path)) as (service, events):
        until(lambda: service.status().samples == 6)
        service.start_task("watch-2", classes=2, task="activity")
        until(lambda: any(isinstance(event, TaskEvent) and event.kind == "refused" for event in events))
        service.start_task("watch-3", classes=ACTIVITIES, task="activity", encoder="affine")
        publisher = Publisher(hub)
        publisher.publish("watch-3", samples(1), Y)
        until(lambda: service.status().samples == 12)
        assert (task(service, "watch-3").task, task(service, "watch-3").encoder) == ("activity", "affine")


def test_a_state_of_an_earlier_version_has_a_task_for_each_source() -> None:
    schema = {"kind": "classification", "classes": 2}
    old = {"name": "camera", "schema": schema, "finished": False, "batches": 1, "samples": 6}
    counts = dict.fromkeys(("skipped", "dead_letters", "late"), 0)
    records = Records()
    records.load_state_dict({"tasks": [old | counts], "request": None, "learner": {"method": {}}})
    assert (records.tasks["camera"].task, records.tasks["camera"].encoder) == ("camera", None)
    assert list(records.described) == ["camera"]


def test_a_service_that_was_stopped_again_and_again_has_learned_the_same(tmp_path: Path) -> None:
    def learn(name: str, stops: int) -> dict[str, Any]:
        folder = tmp_path / name
        hub = list_of_tests(str(folder))
        settings = settings_of(folder, learner={"encoder": "affine", "threads": 1}, together=True)
        for count in range(4):
            for watch in ("watch-1", "watch-2"):
                if count == 0:
                    wear(hub, watch, 0)
                Publisher(hub).publish(watch, samples(count), Y)
            if count < stops:
                with running(settings) as (service, _):
                    until(lambda: service.status().samples == 12 * (count + 1))  # noqa: B023 - called at once
        with running(settings) as (service, _):
            until(lambda: service.status().samples == 48)
        return saved(settings)

    one, other = learn("whole", 0), learn("stopped", 3)
    for ours, theirs in zip(one["task_sources"], other["task_sources"], strict=True):
        assert ours["name"] == theirs["name"]
        assert torch.equal(ours["encoder"]["scale"], theirs["encoder"]["scale"])
    assert all(torch.equal(each, other["backbone"][name]) for name, each in one["backbone"].items())


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "token").write_text(TOKEN)
    server = Server(http_settings(folder, token_file=folder / "token"))
    thread, address = run_in_thread(server)
    wear_four = partial(wear, FolderHub(folder / "hub"), features=4)
    wear_four("watch-1", encoder="affine")
    wear_four("watch-2")
    wear_four("speed", task=None)
    client = Client(address, TOKEN)
    client.wait(lambda: client.get("tasks").content["samples"] == 54)
    client.wait(lambda: server.service.snapshot.step == client.get("tasks").content["steps"])  # type: ignore[union-attr]
    yield client
    server.stop()
    thread.join(60)


def test_predictions_are_a_sources_or_those_of_somebody_unseen(client: Client) -> None:
    body = {"inputs": samples(9, 4).tolist()}

    def outputs(query: str) -> Tensor:
        return torch.tensor(client.post(f"predict?{query}", body).content["outputs"])

    unseen = outputs("task=activity")
    assert torch.allclose(outputs("source=watch-2"), unseen)  # without an encoder
    assert not torch.allclose(outputs("source=watch-1"), unseen)
    assert torch.allclose(outputs("source=watch-1&task=activity"), outputs("source=watch-1"))
    predicted = client.post("predict?source=watch-1", body).content
    assert {each["task"] for each in predicted["predictions"]} == {"activity"}
    assert [name for _, name in predicted["classes"]] == ACTIVITIES
    assert client.post("predict?source=nobody", body).status == 404
    assert client.post("predict?task=watch-1", body).status == 404
    wrong = client.post("predict?source=watch-1&task=speed", body)
    assert (wrong.status, "answers task 'activity'" in str(wrong.content)) == (422, True)


def test_status_and_metrics_say_the_task_of_a_source(client: Client) -> None:
    status = {each["name"]: (each["task"], each["encoder"]) for each in client.get("tasks").content["tasks"]}
    assert status == {"watch-1": ("activity", "affine"), "watch-2": ("activity", None), "speed": ("speed", None)}
    metrics = client.get("metrics").content
    assert 'spcl_samples_total{source="watch-1",task="activity"} 18.0' in metrics
    assert 'spcl_samples_total{source="speed",task="speed"} 18.0' in metrics


def test_a_source_is_started_by_a_request(client: Client) -> None:
    body = {"name": "watch-9", "classes": ACTIVITIES, "task": "activity", "encoder": "affine"}
    assert client.post("tasks", body).status == 202
    client.wait(lambda: (client.task("watch-9") or {}).get("task") == "activity")
    assert client.post("tasks", {**body, "name": "watch-10", "task": "../up"}).status == 422


@pytest.mark.parametrize("wrong", [{"task": "../up"}, {"encoder": "telescope"}, {"tusk": "activity"}])
def test_settings_of_sources_are_checked(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(SpclError, match="source"):
        settings_of(tmp_path, sources={"watch-1": wrong})
