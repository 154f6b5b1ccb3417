"""The state of a service: one service per folder, requests that survive restarts, and checkpoints."""

import copy
import json
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disk import largest_file
from list_hub import ListHub
from serving import (
    HUB,
    invoked,
    knows,
    list_of_tests,
    publish,
    running,
    saved,
    settings_of,
    task,
    until,
)
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.errors import CheckpointError, SpclError, TaskError
from spcl.serve import (
    CheckpointEvent,
    DeadLetterEvent,
    SaveFailedEvent,
    ServeSettings,
    Service,
    StepEvent,
    TaskEvent,
)
from spcl.serve.api import Metrics
from spcl.serve.events import Totals
from spcl.serve.service import Snapshot
from spcl.serve.session import TaskStateError
from spcl.serve.state import StateInUseError, held_state, read_model
from spcl.sources import FolderHub, Publisher


@pytest.fixture
def hub(tmp_path: Path) -> ListHub:
    return list_of_tests(str(tmp_path))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ServeSettings]:
    return partial(settings_of, tmp_path)


# -- one service per folder


def test_the_state_is_for_the_services_user_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)  # as an earlier version left it
    with held_state(state):
        assert state.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_service_was_writing_is_removed(tmp_path: Path) -> None:
    partial, foreign = tmp_path / ".owner.json.0123abcd.partial", tmp_path / "notes.partial"
    for file in (partial, foreign):
        file.touch()
    with held_state(tmp_path):
        assert not partial.exists()
        assert foreign.exists()


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


# -- requests


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
        with pytest.raises(TaskError, match=r"there is no task 'b'; the running tasks are \['a'\]"):
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


def test_a_task_is_finished_by_one_request(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 3)
    settings = make()
    with running(settings) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 3)
        service.finish_task("a")
        with pytest.raises(TaskStateError, match="task 'a' is finished already, or about to be"):
            service.finish_task("a")
        until(lambda: task(service).state == "finished")
    with running(settings) as (service, events):
        until(lambda: service.status().running)
        with pytest.raises(TaskStateError, match="finished already"):
            service.finish_task("a")
    assert not [event for event in events if isinstance(event, TaskEvent)]


def test_requests_that_cannot_be_carried_out_are_put_aside(
    hub: ListHub, make: Callable[..., ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spcl.serve.state.MOST_REQUESTS", 4)
    publish(hub, "a", 3)
    settings = make()
    stored = FolderHub(settings.state / "requests")
    good: list[dict[str, Any]] = [
        {"do": "start", "task": "b", "schema": {"kind": "classification", "classes": 2}},
        {"do": "finish", "task": "a"},
        {"do": "start", "task": "c", "schema": {"kind": "regression", "classes": 1}},
    ]
    wrong: list[Any] = [
        {"do": "finish", "task": "a"},
        {"do": "finish", "task": "nobody"},
        {"do": "start", "task": "b", "schema": {"kind": "classification", "classes": 3}},
        {"do": "start", "task": "d", "schema": {"kind": "classification", "classes": 0}},
        {"do": "start", "task": "../d", "schema": {"kind": "regression", "classes": 1}},
        {"do": "start", "task": "d"},
        {"do": "dance", "task": "a"},
        {"do": "finish"},
        {},
        [],
        7,
    ]
    with running(settings) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 3)
    for values in (*good, *wrong):
        stored.append("requests", json.dumps(values).encode())
    stored.append("requests", b"\xff not JSON")
    stored.append("requests", b"[" * 100_000)
    last = stored.append("requests", json.dumps({"do": "finish", "task": "c"}).encode()).partition("/")[0]
    (settings.state / "requests/tasks/requests" / f"{int(last) - 3:020}.safetensors").unlink()
    (settings.state / "requests/tasks/requests" / f"{int(last) - 3:020}.safetensors").mkdir()
    with running(settings) as (service, events):
        until(lambda: [each.state for each in service.status().tasks] == ["finished", "running", "finished"])
    refused = [event for event in events if isinstance(event, TaskEvent) and event.kind == "refused"]
    assert len(refused) == len(wrong) + 2
    assert "there is no source 'a' that has not ended" in refused[0].text
    with running(settings) as (service, events):
        until(lambda: any(isinstance(event, CheckpointEvent) for event in events))
    assert not [event for event in events if isinstance(event, TaskEvent)]
    assert list((settings.state / "requests/dead-letters/requests").glob("*.txt"))


# -- checkpoints


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


@pytest.mark.parametrize("keep", [2, 4])
def test_every_kept_checkpoint_finds_its_messages_in_the_hub(
    keep: int, hub: ListHub, make: Callable[..., ServeSettings], tmp_path: Path
) -> None:
    settings = make(checkpoint_seconds=0.0, keep_checkpoints=keep)
    publish(hub, "a", 12)
    with running(settings) as (service, _):
        until(lambda: service.status().samples == 24)
    assert hub.backlog("a", None) <= keep  # the others are deleted
    newest = settings.state / "learner.safetensors"
    kept = [newest.with_name(f"{newest.name}.previous{age}") for age in ("", "-2", "-3")][: keep - 1]
    assert sorted(settings.state.glob("learner*")) == sorted([newest, *kept])
    for damaged_file in (newest, *kept[:-1]):
        damaged_file.write_bytes(b"damaged")
    service = Service(settings, on_event=lambda _: service.stop() if service.status().samples == 24 else None)
    with pytest.warns(RuntimeWarning, match="going back to"):
        service.run()
    assert task(service).batches == 12


def test_failing_to_save_is_reported_and_alarms_until_it_works(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    publish(hub, "a", 2)
    with running(make(ready_seconds=0.3)) as (service, events):
        until(lambda: task(service).batches == 2 and service.status().unsaved == 0)
        with largest_file(100):
            publish(hub, "a", 2, announce=False)
            until(lambda: any("no checkpoint could be saved" in fault for fault in service.faults()))
            until(lambda: service.status().save_failures > 1)
            metrics = Metrics(Totals, service.status).text().decode()
            publish(hub, "a", 2, announce=False)
            until(lambda: task(service).batches == 6)
        until(lambda: not service.faults() and service.status().unsaved == 0)
    (failed,) = [event for event in events if isinstance(event, SaveFailedEvent)]
    assert "File too large" in failed.reason
    assert "spcl_ready 0.0" in metrics
    values = {name: float(value) for name, value in re.findall(r"^(spcl_[^\s]+) (\S+)$", metrics, re.MULTILINE)}
    assert values["spcl_save_failures_total"] > 1
    assert values["spcl_checkpoint_age_seconds"] > 0.3


def test_the_age_of_the_checkpoint_stays_0_while_there_is_nothing_to_save(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    publish(hub, "a", 2)
    with running(make()) as (service, _):
        until(lambda: task(service).batches == 2 and (service.status().checkpoint_age or 0) > 0.5)
        metrics = Metrics(Totals, service.status).text().decode()
    assert "\nspcl_checkpoint_age_seconds 0.0\n" in metrics


def test_a_learner_of_an_earlier_version_goes_on_with_the_settings_that_it_had(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    before = {"method": {"name": "spcl", "finished_weight": 1.0}, "scenario": "class"}
    with running(settings := make(learner=before)) as (service, _):
        until(lambda: service.status().uptime > 0)
    state = saved(settings)
    del state["sources"]["service"]["learner"]["method"]["finished_weight"]
    write_checkpoint(settings.state / "learner.safetensors", state)
    assert changes_at_start(make(learner=before)) == []
    changed = make(learner=before | {"method": "spcl"})
    assert changes_at_start(changed) == ["method.finished_weight from 1.0 to 0.01"]


def changes_at_start(settings: ServeSettings) -> list[str]:
    """The changed settings that a service tells when it starts."""
    with running(settings) as (service, events):
        until(lambda: service.status().uptime > 0)
    return [event.text for event in events if isinstance(event, TaskEvent) and event.kind == "changed"]


@pytest.mark.parametrize("memory", ["balanced", "reservoir"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learning_rate": 0.5}, ["learning_rate from 0.001 to 0.5"]),
        ({"memory_budget": 7}, ["memory_budget from 20 to 7"]),
        ({"memory_budget": 30}, ["memory_budget from 20 to 30"]),
        ({"method": "er"}, ["method from soro to er"]),
        (
            {"method": {"name": "soro", "replay_loss": "logits"}, "memory_budget": 9},
            ["memory_budget", "method.logit_weight from None", "method.replay_loss from labels to logits"],
        ),
    ],
)
def test_the_model_outlives_a_change_of_rate_budget_or_method(
    memory: str, changes: dict[str, Any], told: list[str], hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    publish(hub, "old", 6).end("old")
    publish(hub, "a", 4)
    learner = {"memory": memory, "learning_rate": 0.001}
    with running(before := make(learner=learner)) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 4 and task(service, "old").state == "finished")
    first, after = saved(before), make(learner=learner | changes)
    found = changes_at_start(after)
    assert [change.startswith(text) for change, text in zip(found, told, strict=True)] == [True] * len(told)
    second = saved(after)
    assert all(torch.equal(first["backbone"][name], second["backbone"][name]) for name in first["backbone"])
    assert changes_at_start(after) == []
    publish(hub, "a", 20, start=4, announce=False)
    with running(after) as (service, events):
        until(lambda: task(service).batches == 24)
    third = saved(after)
    assert [event for event in events if isinstance(event, DeadLetterEvent)] == []
    budget = after.run_settings().memory_budget
    counts = {each["name"]: len(each["ranks"]) for each in third["memory"]["state"]["tasks"]}
    assert (counts["old"] if memory == "balanced" else sum(counts.values())) <= budget
    assert (memory == "balanced") or sum(counts.values()) == budget
    assert {group["lr"] for group in third["optimizer"]["groups"]} == {after.run_settings().learning_rate}
    assert third["method"]["name"] == after.run_settings().method["name"]
    assert not all(torch.equal(second["backbone"][name], third["backbone"][name]) for name in second["backbone"])


def test_a_new_service_has_a_reservoir_and_one_of_earlier_versions_keeps_its_memory(
    hub: ListHub, make: Callable[..., ServeSettings], tmp_path: Path
) -> None:
    """Earlier versions began with the memory balanced, where the settings named none."""
    new = make(state=tmp_path / "new")
    assert changes_at_start(new) == []
    assert saved(new)["sources"]["service"]["learner"]["memory"] == "reservoir"
    publish(hub, "old", 4).end("old")
    publish(hub, "a", 4)
    with running(make(together=True, learner={"memory": "balanced"})) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 4 and task(service, "old").state == "finished")
    publish(hub, "a", 6, start=4, announce=False)
    states = []
    for name, learner in {"named": {"memory": "balanced"}, "unnamed": {}}.items():
        shutil.copytree(make().state, tmp_path / name)
        HUB[name] = copy.deepcopy(hub)
        source = {"name": "list-of-tests", "key": name}
        with running(settings := make(state=tmp_path / name, source=source, together=True, learner=learner)) as (
            service,
            events,
        ):
            until(lambda service=service: task(service).batches == 10)
        assert [event for event in events if isinstance(event, TaskEvent) and event.kind == "changed"] == []
        states.append(saved(settings))
    one, other = states
    assert one["sources"]["service"]["learner"] == other["sources"]["service"]["learner"]
    assert one["memory"]["state"]["policy"] == other["memory"]["state"]["policy"] == "BalancedCoreset"
    assert all(torch.equal(one["backbone"][name], other["backbone"][name]) for name in one["backbone"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"memory_budget": 0},
            r"memory_budget = 20, .* say 0 \(a memory is neither added nor removed\); put the setting",
        ),
        (
            {"memory": "balanced"},
            r"memory = 'reservoir', .* say 'balanced' \(it decides what the learner is\); put the",
        ),
        ({"backbone": {"name": "mlp", "hidden": [9]}}, r"backbone = .*hidden': \[9\].*choose another state folder"),
    ],
)
def test_other_changes_of_the_learner_are_refused_with_what_to_do(
    changes: dict[str, Any], words: str, make: Callable[..., ServeSettings]
) -> None:
    with running(make()) as (service, _):
        until(lambda: service.status().uptime > 0)
    with pytest.raises(CheckpointError, match=words):
        Service(make(learner=changes)).run()


def test_the_model_outlives_a_change_of_a_plugin(
    tmp_path: Path, hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import torch\nfrom spcl.methods import Method, Weights\n\n\nclass PlainSumOfTests(Method):\n"
        "    name, family, summary, reference = 'plain-sum-of-tests', 'MTL', 'the sum', 'none'\n\n"
        "    def weigh(self, gradients):\n"
        "        return Weights(torch.ones(len(gradients.names)))\n"
    )
    publish(hub, "a", 2)
    with running(make()) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 2)
    learner = {"plugins": [str(plugin)], "method": "plain-sum-of-tests"}
    assert [change.partition(" ")[0] for change in changes_at_start(make(learner=learner))] == ["method", "plugins"]
    plugin.write_text(f"{plugin.read_text()}\n# edited\n")
    (change,) = changes_at_start(make(learner=learner))
    assert change.startswith("plugins from [{'name': ")
    publish(hub, "a", 2, start=2, announce=False)
    with running(make(learner=learner)) as (service, _):
        until(lambda: task(service).batches == 4)


def test_a_method_that_edits_memory_is_refused_where_memory_holds_bytes(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    images = {"inputs": {"shape": [3, 8, 8], "dtype": "uint8"}}
    with running(make(**images)) as (service, _):
        until(lambda: service.status().uptime > 0)
    words = r"method 'gmed' edits samples of memory, but the memory in .* holds uint8\[3, 8, 8\]; put the setting back"
    with pytest.raises(CheckpointError, match=words):
        Service(make(**images, learner={"method": "gmed"})).run()


def test_other_inputs_than_those_of_the_tasks_are_refused(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 1)
    with running(make()) as (service, _):
        until(lambda: service.status().steps == 1)
    words = r"task 'a' .* samples of float32\[3\], and the settings say inputs of float32\[4\]; put the setting back"
    with pytest.raises(CheckpointError, match=words):
        Service(make(inputs={"shape": [4]})).run()


def test_a_task_that_started_with_names_that_are_refused_today_is_loaded(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    publish(hub, "a", 2)
    settings = make()
    with running(settings) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 2)
    state = saved(settings)
    state["sources"]["service"]["tasks"][0]["schema"]["classes"] = ["twice", "twice"]
    write_checkpoint(settings.state / "learner.safetensors", state)
    with running(settings) as (service, _):
        publish(hub, "a", 2, announce=False)
        until(lambda: knows(service, "a") and task(service).batches == 4)


SERVICE, STREAM = ("sources", "service"), ("sources", "stream")
WRONG = {
    "no tasks": ((*SERVICE, "tasks"), None, "tasks of the service is None"),
    "a task is a number": ((*SERVICE, "tasks"), [7], r"tasks of the service is \[7\]"),
    "a nameless task": ((*SERVICE, "tasks", 0, "name"), 7, "name of a task of the service is 7"),
    "a task twice": ((*SERVICE, "tasks", 0, "name"), "b", "task 'b' is twice"),
    "another task": ((*SERVICE, "tasks", 1, "name"), "c", "the stream has a task 'b' that the service has not"),
    "samples": ((*SERVICE, "tasks", 0, "samples"), [], r"samples of a task of the service is \[\]"),
    "batches": ((*SERVICE, "tasks", 0, "batches"), -1, "is -1 in the checkpoint, not a whole number from 0"),
    "finished": ((*SERVICE, "tasks", 0, "finished"), torch.zeros(3, 2), "finished of a task of the service is tensor"),
    "kind": ((*SERVICE, "tasks", 0, "schema", "kind"), "guess", "task 'a' is a 'guess'"),
    "no kind": ((*SERVICE, "tasks", 0, "schema", "kind"), [[1]], r"kind of the schema of task 'a' is \[\[1\]\]"),
    "no schema": ((*SERVICE, "tasks", 0, "schema"), None, "the service has no schema of task 'a'"),
    "classes": ((*SERVICE, "tasks", 0, "schema", "classes"), 3, "has 3 classes in the service, but 2 classes"),
    "a giant head": ((*SERVICE, "tasks", 2, "schema", "classes"), 10**9, "a head of 9 parameters"),
    "request": ((*SERVICE, "request"), True, "request of the service is True"),
    "settings": ((*SERVICE, "learner"), None, "learner of the service is None"),
    "step": ((*STREAM, "step"), "text", "step of the stream is 'text'"),
    "delivered": ((*STREAM, "delivered", "a"), {}, "delivered of the stream is {'a': {}"),
    "ended": ((*STREAM, "ended"), [-1], "the stream has a task -1"),
    "positions": ((*STREAM, "positions", "a"), 7, "positions of the stream is {'a': 7"),
    "ends": ((*STREAM, "ends"), [], r"ends of the stream is \[\]"),
    "no stream": (STREAM, "text", "stream of the sources is 'text'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_content_with_a_right_checksum_is_refused_by_name(
    hub: ListHub, make: Callable[..., ServeSettings], case: str
) -> None:
    publish(hub, "a", 1)
    publish(hub, "b", 1).end("b")
    publisher = Publisher(hub)
    publisher.start("speed", kind="regression", classes=1)
    publisher.publish("speed", torch.rand(2, 3), torch.rand(2, 1))
    with running(settings := make()) as (service, _):
        until(lambda: service.status().samples == 6 and task(service, "b").state == "finished")
    (*place, key), wrong, words = WRONG[case]
    part = content = saved(settings)
    for each in place:
        part = part[each]
    part[key] = wrong
    write_checkpoint(settings.state / "learner.safetensors", content)
    with pytest.raises(CheckpointError, match=words), running(settings):
        pass
    if "service" in place:
        with pytest.raises(CheckpointError, match=words):
            read_model(settings.state)


# -- the model, for other programs


@pytest.fixture
def state(hub: ListHub, make: Callable[..., ServeSettings]) -> tuple[Path, Snapshot]:
    """The state of a service that has learned two tasks, and its last snapshot."""
    publisher = publish(hub, "a", 4)
    publisher.start("speed", kind="regression", classes=["x", "y"])
    publisher.publish("speed", torch.rand(5, 3), torch.rand(5, 2))
    publisher.start("later", classes=2)  # no batch: the learner does not have it yet
    settings = make(learner={"average": 0.9})
    with running(settings, predicts=True) as (service, _):
        until(lambda: service.status().samples == 13 and knows(service, "later"))
    assert service.snapshot is not None
    return settings.state, service.snapshot


def test_a_model_of_a_service_predicts_as_the_service_did(state: tuple[Path, Snapshot], tmp_path: Path) -> None:
    folder, snapshot = state
    x = torch.rand(6, 3)
    np.save(tmp_path / "x.npy", x.numpy())
    generator = torch.get_rng_state()
    learner = read_model(folder).learner("cpu")
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(learner.predict_proba(x, "a"), snapshot.model.predict_proba(x, "a"))
    command = ("predict", folder, tmp_path / "x.npy", "--format", "json", "--device", "cpu", "--task")
    found = [json.loads(line) for line in invoked(*command, "a").stdout.splitlines()]
    expected = snapshot.model.predict_proba(x, "a").max(dim=1)
    assert [row["probability"] for row in found] == pytest.approx(expected.values.tolist())
    numbers = [json.loads(line)["outputs"] for line in invoked(*command, "speed").stdout.splitlines()]
    assert [list(row.values()) for row in numbers] == pytest.approx(
        snapshot.model.predict(x, "speed").numpy(), rel=1e-5
    )
    assert {*numbers[0]} == {"x", "y"}


def test_a_model_of_a_service_is_exported(state: tuple[Path, Snapshot], tmp_path: Path) -> None:
    folder, snapshot = state
    invoked("export", folder, "--task", "speed", "--out", tmp_path / "speed.pt2")
    x = torch.rand(9, 3)
    program = torch.export.load(tmp_path / "speed.pt2").module()
    torch.testing.assert_close(program(x), snapshot.model.predict(x, "speed"))
    description = json.loads((tmp_path / "speed.pt2.json").read_text())
    assert [column["class"] for column in description["columns"]] == ["x", "y"]


def test_a_state_without_a_model_is_refused_with_what_to_do(
    hub: ListHub, make: Callable[..., ServeSettings], state: tuple[Path, Snapshot], tmp_path: Path
) -> None:
    folder, _ = state
    content = read_checkpoint(folder / "learner.safetensors")
    del content["sources"]["service"]["inputs"]
    write_checkpoint(folder / "learner.safetensors", content)
    with pytest.raises(CheckpointError, match=r"an earlier version wrote .*; start the service once with this version"):
        read_model(folder)
    with running(empty := make(state=str(tmp_path / "empty"), source={"name": "folder", "path": str(tmp_path / "no")})):
        pass
    with pytest.raises(CheckpointError, match="has no task yet; wait until"):
        read_model(empty.state)
