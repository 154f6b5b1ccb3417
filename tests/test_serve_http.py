"""The HTTP interface of a running service: predictions, tasks, metrics, events; and what it refuses."""

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
import safetensors.torch
import torch

from spcl.errors import SpclError
from spcl.serve import ServeSettings
from spcl.serve.predictor import Predictor
from spcl.serve.server import Server
from spcl.sources import FolderHub, Publisher

TOKEN = "correct horse"
MAX_BYTES = 20_000
JSON = {"Content-Type": "application/json"}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def settings(folder: Path, **http: Any) -> ServeSettings:
    return ServeSettings.of(
        {
            "state": folder / "state",
            "source": {"name": "folder", "path": str(folder / "hub")},
            "inputs": {"shape": [4]},
            "learner": {"method": "soro", "memory": "reservoir", "memory_budget": 50, "threads": 1},
            "checkpoint_seconds": 0.2,
            "http": {"port": 0, "max_bytes": MAX_BYTES, **http},
        }
    )


class Answer(NamedTuple):
    """Status, content and headers of an answer."""

    status: int
    content: Any
    headers: Any


class Client:
    """Sends requests to a service, with a token if there is one."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self.token = token

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        mine = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        request = Request(self.address + path, body, mine | (headers or {}), method=method)
        try:
            with urlopen(request, timeout=60) as answer:
                return self._answer(answer)
        except HTTPError as error:
            with error:
                return self._answer(error)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, content: Any = None, headers: dict[str, str] | None = None) -> Answer:
        return self.send("POST", path, json.dumps(content).encode(), JSON | (headers or {}))

    def wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (found := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def task(self, name: str) -> dict[str, Any] | None:
        return next((task for task in self.get("tasks").content["tasks"] if task["name"] == name), None)

    @staticmethod
    def _answer(answer: Any) -> Answer:
        text = answer.read().decode()
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return Answer(answer.status, json.loads(text) if is_json else text, answer.headers)


def run_in_thread(server: Server) -> tuple[threading.Thread, str]:
    addresses: Queue[str] = Queue()
    thread = threading.Thread(target=server.run, args=(addresses.put,), daemon=True)
    thread.start()
    return thread, addresses.get(timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[Server, str]]:
    """A service with a token that has learned two tasks."""
    (folder / "token").write_text(f"{TOKEN}\n")
    server = Server(settings(folder, token_file=folder / "token"))
    thread, address = run_in_thread(server)
    publish(folder)
    client = Client(address, TOKEN)
    client.wait(
        lambda: (client.task("camera") or {}).get("batches") == 5 == (client.task("speed") or {}).get("batches")
    )
    client.wait(lambda: server.service.predictor.step == client.get("tasks").content["steps"])
    yield server, address
    server.stop()
    thread.join(60)
    assert not thread.is_alive()


def publish(folder: Path) -> None:
    publisher = Publisher(FolderHub(folder / "hub"))
    publisher.start("camera", classes=["cat", "dog", "bird"])
    publisher.start("speed", kind="regression")
    for _ in range(5):
        publisher.publish("camera", X, torch.arange(6) % 3)
        publisher.publish("speed", X, X[:, :1])
    publisher.publish("camera", X, torch.arange(6))  # labels that it does not have


@pytest.fixture(scope="module")
def client(server: tuple[Server, str]) -> Client:
    return Client(server[1], TOKEN)


# -- predictions


def test_lists_and_tensors_give_the_predictions_of_the_snapshot(server: tuple[Server, str], client: Client) -> None:
    predictor = server[0].service.predictor
    assert isinstance(predictor, Predictor)
    binary = {"Content-Type": "application/vnd.safetensors"}
    for task in ("camera", "speed"):
        expected = predictor.predict(X, task).outputs
        first = client.post(f"predict?task={task}", {"inputs": X.tolist()})
        second = client.send("POST", f"predict?task={task}", safetensors.torch.save({"x": X}), binary)
        for answer in (first, second):
            assert answer.status == 200, answer.content
            assert torch.allclose(torch.tensor(answer.content["outputs"]), expected, atol=1e-6)
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


def test_bodies_that_are_too_large_are_not_read(client: Client) -> None:
    content = {"inputs": [[0.5] * 4] * 2000}
    assert client.post("predict?task=camera", content).status == 413
    connection = http.client.HTTPConnection(urlsplit(client.address).netloc)
    headers = JSON | {"Authorization": f"Bearer {TOKEN}"}
    pieces = (b" " * 1000 for _ in range(MAX_BYTES // 1000 + 1))
    connection.request("POST", "/predict?task=camera", pieces, headers, encode_chunked=True)
    answer = connection.getresponse()
    assert (answer.status, "at most 20,000 bytes" in answer.read().decode()) == (413, True)
    connection.close()


# -- who may ask


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1]])
@pytest.mark.parametrize("path", ["tasks", "metrics", "events", "page", "nothing"])
def test_requests_need_the_token(client: Client, token: str | None, path: str) -> None:
    answer = Client(client.address, token).get(path)
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert Client(client.address, token).post("predict", {}).status == 401


def test_health_page_and_description_need_no_token(client: Client) -> None:
    stranger = Client(client.address)
    assert stranger.get("healthz").content == {"status": "ok", "ready": True}
    page = stranger.get("")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for part in re.findall(r'(?:href|src)="(page/.*?)"', page.content):
        assert stranger.get(part).status == 200, part
    assert stranger.get("page/secret.js").status == 404
    described = stranger.get("openapi.json").content
    assert {"/predict", "/tasks", "/tasks/{name}/finish", "/healthz", "/metrics", "/events"} == set(described["paths"])
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described)))
    assert references <= set(described["components"]["schemas"])


def test_only_loopback_is_bound_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpclError, match=r"host is '0\.0\.0\.0', which other machines can reach, but there is no token"):
        Server(settings(tmp_path, host="0.0.0.0"))
    monkeypatch.setenv("SPCL_TEST_TOKEN", "secret")
    Server(settings(tmp_path, host="0.0.0.0", token_variable="SPCL_TEST_TOKEN"))


# -- tasks, metrics, events


def test_tasks_start_and_finish_by_request(client: Client, folder: Path) -> None:
    assert client.post("tasks", {"name": "radar-2", "classes": 2}).status == 202
    client.wait(lambda: client.task("radar-2"))
    assert client.post("predict?task=radar-2", {"inputs": X.tolist()}).status == 503
    Publisher(FolderHub(folder / "hub")).publish("radar-2", X, torch.arange(6) % 2)
    client.wait(lambda: client.post("predict?task=radar-2", {"inputs": X.tolist()}).status == 200)
    assert client.post("tasks/radar-2/finish").status == 202
    client.wait(lambda: client.task("radar-2")["state"] == "finished")
    assert client.post("tasks/radar-2/finish").status == 409


def test_metrics_are_those_of_the_status(client: Client) -> None:
    client.wait(lambda: client.get("tasks").content["memory_samples"])  # counted once a second
    status = client.get("tasks").content
    text = client.get("metrics").content
    values = {name: float(value) for name, value in re.findall(r"^(spcl_[^\s]+) (\S+)$", text, re.MULTILINE)}
    assert values["spcl_learner_steps"] == status["steps"]
    assert values["spcl_memory_samples"] == status["memory_samples"] > 0
    assert values['spcl_samples_total{task="camera"}'] == 30
    assert values['spcl_dead_letters_total{task="camera"}'] == 1
    assert values["spcl_kappa_before"] >= values["spcl_kappa_after"] * 0.99
    assert values['spcl_tasks{state="running"}'] >= 1
    assert values["spcl_predict_seconds_count"] > 0
    assert {f'spcl_loss{{task="{task}"}}' for task in ("camera", "speed")} < set(values)
    assert "process_resident_memory_bytes" in text


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


# -- beginning and end


def test_a_service_without_a_token_answers_this_machine_alone_and_ends_by_sigterm(tmp_path: Path) -> None:
    server = Server(settings(tmp_path))
    answers: list[Answer] = []

    def ask(address: str) -> None:
        client = Client(address)
        own = urlsplit(address).netloc
        client.wait(lambda: client.get("tasks").content["uptime"] > 0)
        answers.append(client.get("healthz"))
        answers.append(client.post("predict?task=camera", {"inputs": [[1, 2, 3, 4]]}))
        answers.append(client.post("tasks", {"name": "camera", "classes": 2}, {"Origin": f"http://{own}"}))
        answers.append(client.post("tasks", {"name": "radar", "classes": 2}, {"Origin": "http://example.org"}))
        answers.append(client.get("tasks", {"Host": "example.org"}))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    asking: list[threading.Thread] = []

    def ready(address: str) -> None:
        asking.append(threading.Thread(target=ask, args=(address,), daemon=True))
        asking[0].start()

    before = signal.getsignal(signal.SIGTERM)
    server.run(ready)
    asking[0].join()
    assert [answer.status for answer in answers] == [200, 404, 202, 403, 403]
    assert signal.getsignal(signal.SIGTERM) == before
    again = Server(settings(tmp_path))  # the task that was started by a request is still there
    thread, address = run_in_thread(again)
    client = Client(address)
    assert client.wait(lambda: client.task("camera"))
    again.stop()
    thread.join(60)


def test_a_port_that_is_taken_is_named(server: tuple[Server, str], tmp_path: Path) -> None:
    port = urlsplit(server[1]).port
    with pytest.raises(SpclError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use"):
        Server(settings(tmp_path, port=port)).run()


def test_a_standby_takes_over_port_and_state_and_can_be_stopped_before(tmp_path: Path) -> None:
    first = Server(settings(tmp_path))
    thread, address = run_in_thread(first)
    client = Client(address)
    client.wait(lambda: client.get("tasks").content["uptime"] > 0)
    assert client.post("tasks", {"name": "camera", "classes": 2}).status == 202
    same = settings(tmp_path, port=urlsplit(address).port)
    second, third = Server(same, standby=True), Server(same, standby=True)
    waiting = [threading.Thread(target=each.run, daemon=True) for each in (second, third)]
    for each in waiting:
        each.start()
    third.stop()
    waiting[1].join(60)
    assert not waiting[1].is_alive()
    first.stop()
    thread.join(60)
    assert client.wait(lambda: second.service.status().tasks)
    assert client.task("camera")
    second.stop()
    waiting[0].join(60)
    assert not waiting[0].is_alive()
