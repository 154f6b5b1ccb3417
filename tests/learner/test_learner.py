"""The learner on networks of many kinds, on examples, and through any order of calls."""

import ast
import copy
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss, mse_loss
from torch.optim import lr_scheduler as schedules
from typer.testing import CliRunner

from _learning import TinyResNet, assert_same, batch, complete_state, images
from spcl.checkpoint import read_checkpoint
from spcl.cli.app import app
from spcl.errors import CheckpointError, TaskError
from spcl.learner import Learner, StepReport
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import ER, SORO, SORODBT, Method

SGD = partial(torch.optim.SGD, lr=0.05)
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def two_tasks(backbone: nn.Module, method: Method | None = None, **options: object) -> Learner:
    learner = Learner(backbone, method or SORO(), **{"optimizer": SGD, **options})
    learner.add_task("a", classes=3)
    learner.add_task("b", classes=2)
    return learner


def train(learner: Learner, steps: int, device: str = "cpu") -> Learner:
    for seed in range(steps):
        pairs = {"a": batch(6, 3, seed), "b": batch(4, 2, seed + 50)}
        learner.step({name: (x.to(device), y.to(device)) for name, (x, y) in pairs.items()})
    return learner


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


# -- heads


def test_regression_and_multi_label_heads_learn_beside_a_classifier() -> None:
    torch.manual_seed(0)
    learner = Learner(TinyResNet(8), SORO(), optimizer=partial(torch.optim.Adam, lr=0.01), memory=Reservoir(30))
    learner.add_task("kind", classes=2)
    learner.add_task("speed", head=nn.Linear(16, 1), loss=l1_loss)
    learner.add_task("tags", head=nn.Linear(16, 3), loss=binary_cross_entropy_with_logits)
    x = images(48, 1)
    level, tags = x.mean(dim=(2, 3)), (x.mean(dim=(1, 2)) > 0)[:, :3].float()
    pairs = {"kind": (x, (level[:, 0] > 0).long()), "speed": (x, level[:, :1]), "tags": (x, tags)}
    reports = [learner.step(pairs) for _ in range(40)]
    for name in pairs:
        assert reports[-1].losses[name] < 0.7 * reports[0].losses[name], name
    assert learner.predict(x, task="kind").eq(pairs["kind"][1]).float().mean() > 0.9
    assert learner.predict(x, task="speed").shape == (48, 1)
    assert ((learner.predict(x, task="tags") > 0).float() == tags).float().mean() > 0.8
    learner.finish_task("tags")
    assert "memory" in learner.step({"kind": pairs["kind"]}).losses


def test_a_dense_head_labels_every_pixel() -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    learner = Learner(backbone, SORODBT(), optimizer=partial(torch.optim.Adam, lr=0.02), memory=BalancedCoreset(10))
    learner.add_task("pixels", head=nn.Conv2d(8, 2, 1), loss=cross_entropy)
    learner.add_task("depth", head=nn.Conv2d(8, 1, 1), loss=mse_loss)
    x = images(16, 1)
    pixels, depth = (x[:, 0] > 0).long(), x.sum(dim=1, keepdim=True)
    for _ in range(40):
        report = learner.step({"pixels": (x, pixels), "depth": (x, depth)})
    assert learner.predict(x, task="pixels").argmax(dim=1).eq(pixels).float().mean() > 0.9
    assert report.losses["depth"] < 0.5
    learner.finish_task("pixels")
    report = learner.step({"depth": (x, depth)})
    assert set(report.losses) == {"depth", "memory"}


def test_samples_need_not_be_images_or_floats() -> None:
    torch.manual_seed(0)
    words = nn.Sequential(nn.EmbeddingBag(20, 6), nn.Linear(6, 6))
    learner = two_tasks(words, memory=Reservoir(10))
    x, y = torch.arange(40).view(8, 5) % 20, torch.arange(8) % 2
    for _ in range(2):
        report = learner.step({"a": (x, y), "b": (x, y)})
    assert set(report.losses) == {"a", "b", "memory"}
    assert learner.memory.draw(1)[0].x.dtype == torch.int64


# -- backbones


def test_frozen_parameters_stay_and_the_others_move_as_by_hand() -> None:
    backbone = TinyResNet().double()
    for part in (backbone.stem, backbone.shortcut):
        part.requires_grad_(False)
    frozen = copy.deepcopy(weights(nn.ModuleDict({"stem": backbone.stem[0], "shortcut": backbone.shortcut[0]})))
    learner = Learner(backbone, ER(), optimizer=SGD)
    learner.add_task("a", classes=3)
    x, y = batch(6, 3, 0, torch.float64)
    learner.step({"a": (x, y)})
    reference, head = copy.deepcopy(backbone), copy.deepcopy(learner.tasks["a"].head)
    learner.step({"a": (x, y)})
    moving = dict(reference.residual.named_parameters())
    gradients = torch.autograd.grad(cross_entropy(head(reference(x)), y), list(moving.values()))
    for (name, before), gradient in zip(moving.items(), gradients, strict=True):
        torch.testing.assert_close(backbone.residual.get_parameter(name), before - 0.05 * gradient)
    assert_same(weights(nn.ModuleDict({"stem": backbone.stem[0], "shortcut": backbone.shortcut[0]})), frozen)
    assert learner._engine.gradients.length == sum(p.numel() for p in backbone.residual.parameters())


def test_frozen_layers_may_be_penalised_but_do_not_move() -> None:
    backbone = TinyResNet()
    backbone.stem.requires_grad_(False)
    before = weights(backbone.stem[0])
    train(two_tasks(backbone, SORODBT(alpha=0.1)), 2)
    assert_same(weights(backbone.stem[0]), before)


def test_a_part_kept_in_evaluation_mode_stays_so() -> None:
    backbone = TinyResNet()
    backbone.stem.eval()
    before = weights(backbone.stem[1])
    learner = train(two_tasks(backbone), 2)
    learner.predict(images(3, 0), task="a")
    train(learner, 1)
    assert not backbone.stem.training
    assert backbone.residual.training
    assert torch.equal(backbone.stem[1].running_mean, before["running_mean"])


def test_training_goes_on_in_training_mode_after_the_user_evaluated() -> None:
    learner = train(two_tasks(TinyResNet()), 1)
    before = weights(learner.model.backbone.stem[1])["running_mean"]
    learner.model.backbone.eval()
    train(learner, 1)
    assert not torch.equal(learner.model.backbone.stem[1].running_mean, before)


def test_channels_last_gives_the_same_training_and_stays() -> None:
    plain = train(two_tasks(TinyResNet(), SORODBT()), 3)
    last = train(two_tasks(TinyResNet().to(memory_format=torch.channels_last), SORODBT()), 3)
    torch.testing.assert_close(weights(plain.model.backbone), weights(last.model.backbone), rtol=1e-4, atol=1e-5)
    kernel = last.model.backbone.residual[0].weight
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert kernel.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_channels_last_goes_on_from_a_checkpoint(tmp_path: Path, device: str) -> None:
    def backbone() -> nn.Module:
        return TinyResNet().to(device, memory_format=torch.channels_last)

    adam = partial(torch.optim.Adam, lr=1e-2, fused=True)
    whole = train(two_tasks(backbone(), optimizer=adam), 3, device)
    whole.save(tmp_path / "checkpoint")
    resumed = Learner.load(tmp_path / "checkpoint", backbone=backbone(), optimizer=adam)
    kernel = resumed.model.backbone.residual[0].weight
    assert resumed.optimizer.state[kernel]["exp_avg"].stride() == kernel.stride()
    found, expected = (weights(train(learner, 2, device).model.backbone) for learner in (resumed, whole))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_parameters_may_lie_in_memory_with_gaps() -> None:
    class Gappy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(32, 16)[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ self.weight

    gappy, dense = Gappy(), Gappy()
    dense.weight = nn.Parameter(gappy.weight.detach().contiguous())
    for backbone in (gappy, dense):
        train(two_tasks(backbone), 2)
    torch.testing.assert_close(gappy.weight, dense.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_heads_follow_the_type_of_the_backbone(dtype: torch.dtype) -> None:
    learner = two_tasks(TinyResNet().to(dtype), SORO())
    for seed in range(2):
        report = learner.step({"a": batch(6, 3, seed, dtype), "b": batch(4, 2, seed, dtype)})
    assert not report.skipped
    assert {p.dtype for module in learner.model.modules() for p in module.parameters()} == {dtype}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inside the compiler
def test_a_compiled_backbone_trains_as_the_plain_one(tmp_path: Path) -> None:
    torch.compiler.reset()
    backbone = TinyResNet()
    compiled = two_tasks(torch.compile(backbone, backend="aot_eager"), SORODBT(), scenario="class")
    plain = two_tasks(TinyResNet(), SORODBT(), scenario="class")
    for learner in (compiled, plain):
        for seed in range(2):
            learner.step({"a": batch(6, 3, seed), "b": batch(6, 2, seed + 50)})
    torch.testing.assert_close(weights(backbone), weights(plain.model.backbone), rtol=1e-4, atol=1e-5)
    compiled.save(tmp_path / "c")
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1))
    assert torch.equal(loaded.predict(images(5, 1)), plain.predict(images(5, 1)))


def test_mixed_precision_stays_close_and_keeps_full_precision_weights(tmp_path: Path) -> None:
    full = train(two_tasks(TinyResNet(8), SORO(), memory=Reservoir(8)), 4)
    mixed = train(two_tasks(TinyResNet(8), SORO(), memory=Reservoir(8), autocast=torch.bfloat16), 4)
    found, expected = weights(mixed.model.backbone), weights(full.model.backbone)
    start = weights(TinyResNet(8))
    for name, value in expected.items():
        if value.is_floating_point() and "running" not in name:
            assert found[name].dtype == torch.float32
            assert (found[name] - value).norm() < 0.25 * (value - start[name]).norm() + 1e-3, name
    assert mixed.logits(images(3, 0), task="a").dtype == torch.float32
    assert not torch.equal(found["stem.0.weight"], expected["stem.0.weight"])
    mixed.save(tmp_path / "c")
    assert Learner.load(tmp_path / "c", backbone=TinyResNet(8)).model.autocast == torch.bfloat16


# -- optimisers

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "single-tensor": partial(torch.optim.Adam, lr=0.01, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_with_one_task_every_optimiser_trains_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    learner = Learner(TinyResNet(), ER(), optimizer=OPTIMISERS[name])
    learner.add_task("a", classes=3)
    learner.step({"a": batch(6, 3, 0)})
    learner.step({"a": batch(6, 3, 1)})
    learner.save(tmp_path / "c")
    learner = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1))  # made anew from what the file says
    learner.step({"a": batch(6, 3, 2)})

    backbone = TinyResNet()
    fresh = Learner(TinyResNet(), ER())
    fresh.add_task("a", classes=3)
    fresh.step({"a": (images(3, 0) * torch.nan, torch.arange(3))})  # makes the head, trains nothing
    head = fresh.tasks["a"].head
    optimizer = OPTIMISERS[name]([{"params": list(module.parameters())} for module in (backbone, head)])
    for seed in range(3):
        x, y = batch(6, 3, seed)
        optimizer.zero_grad()
        cross_entropy(head(backbone(x)), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(learner.model.backbone), weights(backbone), rtol=1e-5, atol=1e-6)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": partial(schedules.StepLR, step_size=1, gamma=0.5),
    "lambda": partial(schedules.LambdaLR, lr_lambda=lambda epoch: 0.5**epoch),
    "linear": partial(schedules.LinearLR, start_factor=0.5),
    "one cycle": partial(schedules.OneCycleLR, max_lr=0.05, total_steps=10),
    "cosine": partial(schedules.CosineAnnealingLR, T_max=10),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_made_before_the_first_batch_covers_the_heads(kind: str) -> None:
    learner = two_tasks(TinyResNet())
    weight = nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([weight], lr=0.05)
    mine, theirs = SCHEDULES[kind](learner.optimizer), SCHEDULES[kind](plain)
    for _ in range(3):
        train(learner, 1)
        plain.step()
        mine.step()
        theirs.step()
        assert [group["lr"] for group in learner.optimizer.param_groups] == [plain.param_groups[0]["lr"]] * 2
    assert learner.optimizer.param_groups[-1]["tasks"] == ["a", "b"]


def test_a_schedule_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def made(learner: Learner) -> schedules.MultiStepLR:
        return schedules.MultiStepLR(learner.optimizer, milestones=[2, 4], gamma=0.5)

    def go_on(learner: Learner, schedule: schedules.MultiStepLR) -> list[float]:
        rates = []
        for _ in range(4):
            train(learner, 1)
            schedule.step()
            rates += [group["lr"] for group in learner.optimizer.param_groups]
        return rates

    learner = two_tasks(TinyResNet())
    schedule = made(learner)
    train(learner, 1)
    schedule.step()
    learner.save(tmp_path / "c", schedule=schedule)
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1))
    again = made(loaded)
    again.load_state_dict(read_checkpoint(tmp_path / "c")["sources"]["schedule"])
    assert go_on(loaded, again) == go_on(learner, schedule)
    assert_same(complete_state(loaded), complete_state(learner))


def test_an_optimiser_whose_step_takes_nothing() -> None:
    class Plain(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            super().step()

    learners = [
        train(two_tasks(TinyResNet(), optimizer=partial(kind, lr=0.05)), 2) for kind in (Plain, torch.optim.SGD)
    ]
    assert_same(*(weights(learner.model.backbone) for learner in learners))


def test_several_groups_of_shared_parameters_and_a_schedule_are_kept(tmp_path: Path) -> None:
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kernels, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
        return torch.optim.SGD([{"params": kernels, "weight_decay": 0.1}, {"params": others}], lr=0.05)

    learner = train(two_tasks(TinyResNet(), optimizer=grouped), 1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.5)
    train(learner, 1)
    schedule.step()
    learner.save(tmp_path / "c")
    train(learner, 1)
    loaded = train(Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1), optimizer=grouped), 1)
    assert_same(complete_state(loaded), complete_state(learner))
    assert {group["lr"] for group in loaded.optimizer.param_groups} == {0.025}
    with pytest.raises(CheckpointError, match=r"groups of \[4, 8, .*\] parameters, the learner of \[12, "):
        Learner.load(tmp_path / "c", backbone=TinyResNet())


# -- devices


@CUDA
@pytest.mark.parametrize("memory_device", ["cpu", "cuda", None])
@pytest.mark.parametrize(("data_device", "capture"), [("cpu", False), ("cuda", False), ("cuda", True)])
@pytest.mark.parametrize("method", [ER, SORO, SORODBT])
def test_training_on_cuda_equals_training_on_the_cpu(
    method: type[Method], data_device: str, capture: bool, memory_device: str | None, tmp_path: Path
) -> None:
    def learner(device: str, memory: str | None) -> Learner:
        kept, backbone = Reservoir(8, device=memory), TinyResNet().double().to(device)
        return two_tasks(backbone, method(), memory=kept, scenario="class", capture=capture)

    def double(learner: Learner, steps: int, device: str) -> Learner:
        for seed in range(steps):
            pairs = {"a": batch(6, 3, seed, torch.float64), "b": batch(4, 2, seed + 50, torch.float64)}
            learner.step({name: (x.to(device), y.to(device)) for name, (x, y) in pairs.items()})
        return learner

    here, there = double(learner("cpu", None), 4, "cpu"), double(learner("cuda", memory_device), 4, data_device)
    torch.testing.assert_close(weights(there.model.backbone), weights(here.model.backbone), rtol=1e-7, atol=1e-8)
    there.save(tmp_path / "c")
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1).double().cuda())
    assert loaded.tasks["a"].head.weight.is_cuda
    double(here, 5, "cpu")
    double(loaded, 5, data_device)
    torch.testing.assert_close(weights(loaded.model.backbone), weights(here.model.backbone), rtol=1e-6, atol=1e-7)
    loaded.add_task("c", classes=2)  # its samples may lie elsewhere than those restored to memory
    for seed in range(3):
        x, y = batch(8, 2, seed, torch.float64)
        report = loaded.step({"c": (x.cuda(), y.cuda())})
    assert set(report.losses) == {"c", "memory"}
    assert loaded.predict(images(5, 1, torch.float64)).is_cuda


@CUDA
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("method", [ER, SORO, SORODBT])
def test_a_bad_task_leaves_no_trace_on_cuda_either(method: type[Method], capture: bool) -> None:
    states = []
    for extra in (True, False):
        torch.manual_seed(0)
        learner = two_tasks(TinyResNet(dropout=0.3).cuda(), method(), memory=Reservoir(8), capture=capture)
        train(learner, 2, "cuda")
        bad = {"b": (images(5, 1) * torch.nan, torch.arange(5) % 2)} if extra else {}
        report = learner.step({"a": batch(6, 3, 9), **bad})
        assert list(report.skipped) == list(bad)
        state = complete_state(learner)
        del state["tasks"]
        states.append(state)
    torch.testing.assert_close(states[0]["backbone"], states[1]["backbone"])
    assert_same(states[0]["random"], states[1]["random"])


@CUDA
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inside the compiler
def test_mixed_precision_and_compiled_backbones_work_on_cuda() -> None:
    torch.compiler.reset()
    backbone = torch.compile(TinyResNet(8).cuda())
    options = {"memory": Reservoir(8), "autocast": torch.bfloat16, "capture": False}
    learner = train(two_tasks(backbone, SORODBT(), **options), 4, "cuda")
    assert all(value.isfinite().all() for value in weights(learner.model.backbone).values())


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_own_data_is_learnt_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "own_data.py"
    runpy.run_path(str(path), run_name="__main__")
    found = {name: float(right) for name, right in re.findall(r"(\w+): ([\d.]+)%", capsys.readouterr().out)}
    assert found["direction"] > 90
    assert found["distance"] > 70
    lines = path.read_text().split("\nbackbone = ")[1].rstrip().splitlines()
    assert len(lines) == 10


def test_live_sources_join_late_die_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["live_multi_source.py", "--steps", "60", "--out", str(picture)])
    runpy.run_path(str(EXAMPLES / "live_multi_source.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "source 'load' failed: cable disconnected" in printed
    rows = {
        name: (int(count), int(failures)) for name, count, failures in re.findall(r"(\w+) +│ (\d+) +│ (\d)", printed)
    }
    assert set(rows) == {"vibration", "load", "acoustic"}
    assert rows["load"][1] == 1
    assert rows["load"][0] > 60 // 20, "it did not come back"
    assert rows["vibration"][0] > rows["acoustic"][0] > 0
    assert len(re.findall(r"│ \d+\.\d s ago", printed)) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


SHORT = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in ("demo", "live_multi_source", "serve_demo")]


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_examples_are_short_and_listed(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    assert f"(examples/{path.name})" in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")


def printed_by(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_wearers_who_left_and_one_who_was_never_seen_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("wearables", capsys)
    found = {name: float(right) for name, right in re.findall(r"^(\w+) +\(.*\): (\d+)%", printed, re.MULTILINE)}
    assert min(found[name] for name in ("anna", "ben", "carla")) > 85
    assert found["dora"] > 55  # of four activities, without a scale and shift of her own
    assert printed.count("anna puts on") == 2


def test_own_method_helps_the_task_with_small_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    found = dict(re.findall(r"(\w+)\(.*\): ([\d.]+)%", printed_by("own_method", capsys)))
    assert float(found["Balanced"]) > float(found["ER"])


def test_regression_and_multilabel_sources_are_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("regression_and_multilabel", capsys)
    found = {name: float(score) for name, score in re.findall(r"(\w+): ([\d.]+) ", printed)}
    assert found["quadrant"] > 0.9
    assert found["radius"] < 0.05
    assert found["tags"] < 0.3


def test_schedule_and_clipping_resume_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("schedule_and_clipping", capsys)
    assert "identical after loading: True" in printed
    assert float(re.findall(r"sum: ([\d.]+)%", printed)[0]) > 95


def test_live_training_resumes_after_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["live_resume.py", str(tmp_path / "checkpoint")])
    printed = printed_by("live_resume", capsys)
    assert "crashed: power cut" in printed
    assert re.search(r"resumed after \d+ steps", printed)
    assert "finished after" in printed
    delivered = read_checkpoint(tmp_path / "checkpoint")["sources"]["stream"]["delivered"]
    assert delivered == {"left": 150, "upper": 100}


def test_own_backbone_learns_from_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = dict(re.findall(r"(\w+): ([\d.]+) %", printed_by("own_text_backbone", capsys)))
    assert float(found["topic"]) > 90
    assert float(found["urgency"]) > 80


def test_a_hugging_face_model_is_a_backbone(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    printed = printed_by("hugging_face", capsys)
    assert float(re.findall(r"length: ([\d.]+)%", printed)[0]) > 95
    error, variance = (float(number) for number in re.findall(r" (0\.\d{4})", printed))
    assert error < 0.6 * variance


def commands_of(name: str) -> list[list[str]]:
    """The command lines in the docstring of an example."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    lines = re.findall(r"^    spcl ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(line.replace("\\\n", " ")) for line in lines]


@pytest.mark.parametrize("name", ["own_method", "own_text_backbone", "hugging_face"])
def test_the_command_lines_of_examples_work_as_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "hugging_face":
        pytest.importorskip("transformers")
    (command,) = commands_of(name)
    monkeypatch.chdir(EXAMPLES.parent)
    command[command.index("--out") + 1] = str(tmp_path / "run")
    smaller = ["--set", "data.samples=200"] if "notes" in command else ["--set", "tasks=2", "--set", "evaluate=ended"]
    result = CliRunner().invoke(app, [*command, *smaller, "--set", "threads=1", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "model.safetensors").exists()
    if name == "own_text_backbone":
        pytest.importorskip("onnx")
        arguments = ["export", str(tmp_path / "run"), "--task", "topic", "--out", str(tmp_path / "model.onnx")]
        exported = CliRunner().invoke(app, arguments)  # of inputs that are a dict
        assert exported.exit_code == 0, exported.output


NAMES = ["a", "b", "c", "d", "e"]
BUDGET = 7


@dataclass
class Expected:
    """What is known of one task."""

    classes: int | None
    finished: bool = False
    has_head: bool = False
    observed: int = 0
    skipped: int = 0


@dataclass
class Course:
    """What is known of the whole: the tasks in their order, the steps so far."""

    tasks: dict[str, Expected] = field(default_factory=dict)
    steps: int = 0
    features_known: bool = False

    def running(self) -> list[str]:
        return [name for name, task in self.tasks.items() if not task.finished]

    def classes(self) -> list[tuple[str, int]]:
        return [(name, label) for name, task in self.tasks.items() for label in range(task.classes or 0)]


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1))


def inputs(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


class Life(RuleBasedStateMachine):
    """The learner and the model of it, side by side."""

    @initialize(
        scenario=st.sampled_from(["task", "class"]),
        memory=st.sampled_from([Reservoir, BalancedCoreset, None]),
        method=st.sampled_from([ER, SORO]),
        early=st.booleans(),
    )
    def begin(self, scenario: Any, memory: Any, method: Any, early: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.policy = memory
        self.learner = Learner(
            backbone(),
            method(),
            optimizer=partial(torch.optim.Adam, lr=0.01),
            memory=None if memory is None else memory(BUDGET),
            scenario=scenario,
        )
        self.course = Course()
        self.saved: list[tuple[Path, Course, dict[str, Any]]] = []
        if early:
            return
        self.add([2, None])
        self.train_once({name: self.batch(name, 3, 0) for name in NAMES[:2]}, [])
        self.finish_one(NAMES[0])

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # -- tasks

    @precondition(lambda self: len(self.course.tasks) < len(NAMES))
    @rule(kinds=st.lists(st.sampled_from([1, 2, 3, None]), min_size=1, max_size=2))
    def add(self, kinds: list[int | None]) -> None:
        for name, classes in zip([name for name in NAMES if name not in self.course.tasks], kinds, strict=False):
            own = {"head": nn.Linear(4, 2), "loss": mse_loss}
            self.learner.add_task(name, **(own if classes is None else {"classes": classes}))
            self.course.tasks[name] = Expected(classes, has_head=classes is None or self.course.features_known)

    @precondition(lambda self: len(self.course.running()) > 1)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_one(data.draw(st.sampled_from(self.course.running())))

    def finish_one(self, name: str) -> None:
        self.learner.finish_task(name)
        self.course.tasks[name].finished = True

    # -- training

    @precondition(lambda self: self.course.running())
    @rule(data=st.data(), seed=st.integers(0, 99), steps=st.integers(2, 4))
    def train(self, data: st.DataObject, seed: int, steps: int) -> None:
        for step in range(steps):
            names = data.draw(st.lists(st.sampled_from(self.course.running()), min_size=1, unique=True))
            bad = data.draw(st.just([]) | st.lists(st.sampled_from(names), max_size=1))
            batches = {name: self.batch(name, data.draw(st.integers(2, 5)), seed + step, name in bad) for name in names}
            self.train_once(batches, bad)

    def train_once(self, batches: dict[str, tuple[Tensor, Tensor]], bad: list[str]) -> None:
        replays = self.learner.memory is not None and len(self.learner.memory) > 0
        heads = {name: copy.deepcopy(t.head.state_dict()) for name, t in self.learner.tasks.items() if t.head}
        shared = copy.deepcopy(self.learner.model.backbone.state_dict())
        report = self.learner.step(batches)
        self.note_step(batches, bad, replays, report)
        if set(bad) == set(batches):
            assert_same(self.learner.model.backbone.state_dict(), shared)
        if self.learner.scenario == "task" and not replays:
            for name in (heads.keys() - batches.keys()) | (heads.keys() & set(bad)):
                assert_same(self.learner.tasks[name].head.state_dict(), heads[name])

    def batch(self, name: str, count: int, seed: int, bad: bool = False) -> tuple[Tensor, Tensor]:
        classes = self.course.tasks[name].classes
        x = inputs(count, seed) * (torch.nan if bad else 1.0)
        return x, torch.ones(count, 2) if classes is None else torch.arange(count) % classes

    def note_step(self, batches: dict[str, Any], bad: list[str], replays: bool, report: StepReport) -> None:
        trained = [name for name in self.course.tasks if name in batches and name not in bad]
        assert list(report.losses) == trained + ["memory"] * bool(replays and trained)
        assert list(report.skipped) == bad
        assert report.step == self.course.steps
        self.course.steps += 1
        for name, (x, _) in batches.items():
            task = self.course.tasks[name]
            self.course.features_known |= task.classes is not None
            task.observed += 0 if name in bad else len(x)
            task.skipped += name in bad
        for task in self.course.tasks.values():
            task.has_head |= self.course.features_known

    # -- predictions

    @rule(count=st.integers(1, 4))
    def predict(self, count: int) -> None:
        for name, task in self.course.tasks.items():
            if not task.has_head:
                self.refused(partial(self.learner.predict, inputs(count, 5), task=name), f"'{name}' has seen no data")
                continue
            found = self.learner.predict(inputs(count, 5), task=name)
            assert torch.equal(self.learner.predict(inputs(count, 5), task=name), found)
            assert found.shape == ((count, 2) if task.classes is None else (count,))
            assert task.classes is None or bool(((found >= 0) & (found < task.classes)).all())

    @rule(count=st.integers(1, 4))
    def predict_over_all_classes(self, count: int) -> None:
        x, classes = inputs(count, 5), self.course.classes()
        if self.learner.scenario == "task" or not classes or not self.course.features_known:
            self.refused(lambda: self.learner.predict(x), "needs the task of x|no classification task|no data yet")
            return
        found = self.learner.predict(x)
        assert self.learner.logits(x).shape == (count, len(classes))
        assert ((found >= 0) & (found < len(classes))).all()

    # -- mistakes

    @precondition(lambda self: self.course.tasks)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def make_a_mistake(self, data: st.DataObject, seed: int) -> None:
        name = data.draw(st.sampled_from(list(self.course.tasks)))
        x, y = self.batch(name, 4, seed)
        others = {other: self.batch(other, 3, seed) for other in self.course.running() if other != name}
        calls = {
            f"a task '{name}' already": lambda: self.learner.add_task(name, classes=2),
            "no (source|task) 'stranger'": lambda: self.learner.step({**others, "stranger": (x, y)}),
            f"task '{name}'": lambda: self.learner.step({**others, name: (x, y[:3])}),
            f"task '{name}' ": lambda: self.learner.step({**others, name: (x[:0], y[:0])}),
        }
        if self.course.tasks[name].classes is not None:
            calls[f"'{name}' (is finished|has classes)"] = lambda: self.learner.step({**others, name: (x, y + 3)})
        if self.course.tasks[name].finished:
            calls[f"task '{name}' is finished already"] = lambda: self.learner.finish_task(name)
        for words, call in calls.items():
            self.refused(call, words.rstrip())

    # -- checkpoints

    @precondition(lambda self: len(self.saved) < 3)
    @rule()
    def save(self) -> None:
        path = self.folder / str(len(self.saved))
        state = complete_state(self.learner)
        self.learner.save(path)
        assert_same(complete_state(self.learner), state)
        self.saved.append((path, copy.deepcopy(self.course), state))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        path, course, state = data.draw(st.sampled_from(self.saved))
        heads = {n: (nn.Linear(4, 2), mse_loss) for n, task in course.tasks.items() if task.classes is None}
        self.learner = Learner.load(path, backbone=backbone(), heads=heads)
        self.course = copy.deepcopy(course)
        assert_same(complete_state(self.learner), state)

    # -- what always holds

    def refused(self, call: Any, words: str) -> None:
        before = complete_state(self.learner)
        with pytest.raises(TaskError, match=words):
            call()
        assert_same(complete_state(self.learner), before)

    @invariant()
    def the_tasks_are_as_expected(self) -> None:
        assert list(self.learner.tasks) == list(self.course.tasks)
        assert self.learner.active_tasks == self.course.running()
        assert self.learner.classes == self.course.classes()
        assert self.learner.steps == self.course.steps
        for name, expected in self.course.tasks.items():
            task = self.learner.tasks[name]
            assert (task.finished, task.head is not None) == (expected.finished, expected.has_head)
            assert task.skipped == expected.skipped

    @invariant()
    def the_memory_is_as_expected(self) -> None:
        memory, tasks = self.learner.memory, self.course.tasks
        if memory is None:
            return
        assert memory.seen == sum(task.observed for task in tasks.values())
        if self.policy is Reservoir:
            assert len(memory) == min(BUDGET, memory.seen)
        else:
            assert set(memory.counts()) == {name for name, task in tasks.items() if task.finished}
            assert len(memory) <= min(BUDGET, sum(task.observed for task in tasks.values() if task.finished))
        assert all(part.x.isfinite().all() for part in copy.deepcopy(memory).draw(BUDGET))

    @invariant()
    def everything_is_finite(self) -> None:
        for module in self.learner.model.modules():
            assert all(value.isfinite().all() for value in module.state_dict().values())


TestLife = pytest.mark.filterwarnings("ignore:task .* was skipped in 3 steps in a row")(Life.TestCase)
TestLife.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
