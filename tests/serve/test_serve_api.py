"""The HTTP interface of a running service: predictions, tasks, metrics, events."""

import json
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import safetensors.torch
import torch

from disk import largest_file
from serving import TOKEN, Client, X, http_settings, run_in_thread
from spcl.serve.server import Server
from spcl.serve.session import Session
from spcl.sources import FolderHub, Publisher

# -- predictions


def test_lists_and_tensors_give_the_predictions_of_the_snapshot(server: tuple[Server, str], client: Client) -> None:
    snapshot = server[0].service.snapshot
    assert snapshot is not None
    expected = {"camera": snapshot.model.predict_proba(X, "camera"), "speed": snapshot.model.predict(X, "speed")}
    binary = {"Content-Type": "application/vnd.safetensors"}
    for task in ("camera", "speed"):
        first = client.post(f"predict?task={task}", {"inputs": X.tolist()})
        second = client.send("POST", f"predict?task={task}", safetensors.torch.save({"x": X}), binary)
        for answer in (first, second):
            assert answer.status == 200, answer.content
            assert torch.allclose(torch.tensor(answer.content["outputs"]), expected[task], atol=1e-6)
    answer = client.post("predict?task=camera", {"inputs": X.tolist()}).content
    names = [name for _, name in answer["classes"]]
    best = torch.tensor(answer["outputs"]).argmax(dim=1)
    assert [each["class"] for each in answer["predictions"]] == [names[index] for index in best]
    assert answer["step"] > 0


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "found"),
    [
        ("predict?task=radar", b'{"inputs": [[1, 2, 3, 4]]}', "application/json", 404, "no task 'radar'"),
        (
            "predict?task=camera",
            b'{"inputs": [[1, 2]]}',
            "application/json",
            422,
            "float32[2], but expected are float32[4]",
        ),
        ("predict?task=camera", b'{"inputs": [[NaN, 2, 3, 4]]}', "application/json", 422, "not finite"),
        ("predict?task=speed", b'{"inputs": [[1e39, 2, 3, 4]]}', "application/json", 422, "not finite"),
        ("predict?task=camera", b'{"inputs": []}', "application/json", 422, "float32[]"),
        ("predict?task=camera", b'{"inputs": [["a"]]}', "application/json", 422, "no samples of float32[4]"),
        ("predict?task=camera", b'{"input": [[1, 2, 3, 4]]}', "application/json", 422, "Field required"),
        ("predict?task=camera", b"{", "application/json", 422, "Invalid JSON"),
        ("predict?task=camera", b"[" * 5000, "application/json", 422, "Invalid JSON"),
        ("predict?task=camera", b"hello", "application/octet-stream", 422, "not in the safetensors format"),
        ("predict?task=camera", b"hello", "text/plain", 415, "'text/plain'"),
        ("predict", b'{"inputs": [[1, 2, 3, 4]]}', "application/json", 422, "needs the task"),
        ("tasks", b'{"name": ""}', "application/json", 422, "at least 1 character"),
        ("tasks", b'{"name": "../x", "classes": 3}', "application/json", 422, "cannot be named '../x'"),
        ("tasks", b'{"name": "new", "classes": 0}', "application/json", 422, ""),
        (
            "tasks",
            json.dumps({"name": "宽" * 100, "classes": 2}).encode(),
            "application/json",
            422,
            "at most 200 bytes",
        ),
        ("tasks", b'{"name": "camera", "classes": 3}', "application/json", 409, "'camera'"),
        ("tasks/radar/finish", b"", "application/json", 404, "'radar'"),
        ("nothing", b"", "application/json", 404, "Not Found"),
    ],
)
def test_wrong_requests_are_told_what_was_found(
    client: Client, path: str, body: bytes, kind: str, status: int, found: str
) -> None:
    answer = client.send("POST", path, body, {"Content-Type": kind})
    assert (answer.status, found in json.dumps(answer.content, ensure_ascii=False)) == (status, True), answer.content


def test_a_prediction_does_not_look_at_all_tasks(server: tuple[Server, str], client: Client) -> None:
    built: list[int] = []
    status = Session.status
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "status", lambda session: built.append(1) or status(session))
        for _ in range(30):
            assert client.post("predict?task=camera", {"inputs": X.tolist()}).status == 200
    assert len(built) <= time.monotonic() - begin + 1  # of the events, once a second


# -- tasks


def test_tasks_start_and_finish_by_request(client: Client, folder: Path) -> None:
    assert client.post("tasks", {"name": "radar-2", "classes": 2}).status == 202
    client.wait(lambda: client.task("radar-2"))
    assert client.post("predict?task=radar-2", {"inputs": X.tolist()}).status == 503
    Publisher(FolderHub(folder / "hub")).publish("radar-2", X, torch.arange(6) % 2)
    client.wait(lambda: client.post("predict?task=radar-2", {"inputs": X.tolist()}).status == 200)
    first, second = (client.post("tasks/radar-2/finish") for _ in range(2))
    assert (first.status, second.status) == (202, 409)
    assert (first.content["name"], first.content["state"], first.content["batches"]) == ("radar-2", "running", 1)
    assert first.content["waits_for"] == "its end between two steps, as requested"
    client.wait(lambda: client.task("radar-2")["state"] == "finished")
    assert client.post("tasks/radar-2/finish").status == 409


def test_a_request_that_cannot_be_stored_says_so_and_changes_nothing(client: Client) -> None:
    with largest_file(10):
        answer = client.post("tasks", {"name": "sonar", "classes": 2})
        finish = client.post("tasks/camera/finish")
    assert (answer.status, finish.status) == (507, 507)
    assert "cannot be stored in the state: File too large" in answer.content["detail"]
    assert client.task("sonar") is None
    assert client.post("tasks", {"name": "sonar", "classes": 2}).status == 202


# -- operation


def test_metrics_are_those_of_the_status(client: Client) -> None:
    client.wait(lambda: client.get("tasks").content["memory_samples"])  # counted once a second
    status = client.get("tasks").content
    text = client.get("metrics").content
    values = {name: float(value) for name, value in re.findall(r"^(spcl_[^\s]+) (\S+)$", text, re.MULTILINE)}
    assert values["spcl_learner_steps"] == status["steps"]
    assert values["spcl_memory_samples"] == status["memory_samples"] > 0
    assert values['spcl_samples_total{source="camera",task="camera"}'] == 30
    assert values['spcl_dead_letters_total{source="camera",task="camera"}'] == 1
    assert values["spcl_kappa_before"] >= values["spcl_kappa_after"] * 0.99
    assert values['spcl_tasks{state="running"}'] >= 1
    assert values["spcl_predict_seconds_count"] > 0
    assert {f'spcl_loss{{source="{task}",task="{task}"}}' for task in ("camera", "speed")} < set(values)
    assert "process_resident_memory_bytes" in text


def test_readiness_fails_while_the_hub_is_away(tmp_path: Path) -> None:
    server = Server(http_settings(tmp_path).model_copy(update={"ready_seconds": 0.3}))
    thread, address = run_in_thread(server)
    client = Client(address)
    client.wait(lambda: client.get("readyz").status == 200)
    (tmp_path / "hub/tasks").rename(tmp_path / "away")
    client.wait(lambda: client.get("readyz").status == 503)
    (fault,) = client.get("readyz").content["faults"]
    assert re.fullmatch(r"the hub has not answered for \d+ s", fault)
    metrics = client.get("metrics").content
    assert "spcl_ready 0.0" in metrics
    assert float(re.search(r"^spcl_hub_away_seconds (.*)$", metrics, re.MULTILINE)[1]) > 0.3  # type: ignore[index]
    assert client.get("healthz").status == 200
    (tmp_path / "away").rename(tmp_path / "hub/tasks")
    client.wait(lambda: client.get("readyz").status == 200)
    server.stop()
    thread.join(60)


def test_health_says_that_the_hub_is_away_before_readiness_fails(tmp_path: Path) -> None:
    server = Server(http_settings(tmp_path))
    thread, address = run_in_thread(server)
    client = Client(address)
    client.wait(lambda: client.get("healthz").content["status"] == "ok")
    (tmp_path / "hub/tasks").rename(tmp_path / "away")
    client.wait(lambda: client.get("healthz").content["status"] == "degraded")
    health = client.get("healthz")
    assert (health.status, client.get("readyz").status) == (200, 200)
    assert re.fullmatch(r"the hub has not answered for \d+ s", *health.content["faults"])
    (tmp_path / "away").rename(tmp_path / "hub/tasks")
    client.wait(lambda: client.get("healthz").content["status"] == "ok")
    server.stop()
    thread.join(60)


# -- events


def test_events_begin_with_the_history(client: Client) -> None:
    request = Request(client.address + "events", headers={"Authorization": f"Bearer {TOKEN}"})
    found: dict[str, list[Any]] = {}
    with urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        while len(found.get("update", [])) < 2:
            name, data = answer.readline().decode(), answer.readline().decode()
            assert answer.readline() == b"\n"
            found.setdefault(name.removeprefix("event: ").strip(), []).append(json.loads(data.removeprefix("data: ")))
    first, second = found["update"]
    assert first["reset"]
    assert not second["reset"]
    assert sum(bucket["samples"].get("camera", 0) for bucket in first["buckets"]) == 30
    assert {"camera", "speed"} <= {task["name"] for task in second["status"]["tasks"]}
    assert {"camera", "speed"} <= {event["task"] for event in found["task"] if event["kind"] == "started"}
    assert found["dead-letter"][0]["task"] == "camera"
    assert found["checkpoint"]


def test_readers_of_events_share_every_message(server: tuple[Server, str], client: Client) -> None:
    """What one reader costs, many cost: each gets the history first, then the same updates in the same pace."""
    count = 40
    request = Request(client.address + "events", headers={"Authorization": f"Bearer {TOKEN}"})
    built: list[int] = []
    status = Session.status
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "status", lambda session: built.append(1) or status(session))
        begin = time.monotonic()
        readers = [stack.enter_context(urlopen(request, timeout=60)) for _ in range(count)]
        updates = [[next(each for each in reader if each.startswith(b'data: {"reset')) for reader in readers]]
        for _ in range(2):
            updates.append([next(each for each in reader if each.startswith(b'data: {"reset')) for reader in readers])
        assert len(built) < 10 * (time.monotonic() - begin) + 10
    assert {json.loads(update[6:])["reset"] for update in updates[0]} == {True}
    assert len({update for each in updates[1:] for update in each}) < count / 2  # of 2 × 40
