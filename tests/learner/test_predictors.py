"""What predicts classes instead of the trained heads, against brute force; saved, loaded and exported."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.checkpoint import read_checkpoint
from spcl.errors import SpclError
from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset
from spcl.methods import ER
from spcl.runs.export import export_run
from spcl.runs.run import evaluate_run
from spcl.runs.trained import read_run
from tiny_runs import tiny_run

CLASSES = {"a": 3, "b": 2, "c": 4}
OTHERS = ("class-means", "adjusted", "balanced-heads")
scenarios = pytest.mark.parametrize("scenario", ["task", "class"])
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(9))


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


def batch(task: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + ord(task))
    y = torch.randint(CLASSES[task], (9,), generator=generator)
    x = torch.randn(9, 6, generator=generator)
    x[:, ord(task) - ord("a")] += 2.0 * y
    return x, y


def train(learner: Learner, first: int = 0, last: int = 12) -> Learner:
    """Train tasks a (steps 0 to 4), b (0 to 8) and c (5 on)."""
    for step in range(first, last):
        for task, start in (("a", 0), ("b", 0), ("c", 5)):
            if step == start:
                learner.add_task(task, classes=CLASSES[task])
        spans = {"a": (0, 4), "b": (0, 8), "c": (5, 99)}
        learner.step({task: batch(task, step) for task, (start, end) in spans.items() if start <= step <= end})
        for task, (_, end) in spans.items():
            if step == end:
                learner.finish_task(task)
    return learner


def new_learner(predict_by: Any, scenario: Scenario = "class", **options: Any) -> Learner:
    return Learner(
        backbone(),
        ER(),
        memory=BalancedCoreset(20),
        scenario=scenario,
        memory_batch=4,
        predict_by=predict_by,
        **options,
    )


def stored(learner: Learner) -> dict[str, tuple[Tensor, Tensor]]:
    assert learner.memory is not None
    buffers = learner.memory.buffers
    return {name: (each.take("x"), each.take("y")) for name, each in buffers.items()}


def trained_logits(learner: Learner, x: torch.Tensor, task: str | None) -> torch.Tensor:
    """Return the logits of the trained heads, whatever predicts."""
    with torch.no_grad(), learner._predictor.averaged_weights():
        return learner.model.logits(x, None if task is None else learner.tasks[task])


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def averaged(learner: Learner) -> nn.Module:
    """Return the network of the averaged weights, in evaluation mode."""
    network = deepcopy(learner.model.backbone).eval()
    assert learner._average is not None
    averages = learner._average.averages
    theirs = {name: averages.get(tensor, tensor) for name, tensor in named_tensors(learner.model.backbone).items()}
    for name, mine in named_tensors(network).items():
        mine.data = theirs[name].clone()
    return network


def test_the_nearest_class_mean_is_that_of_averaged_features_of_memory() -> None:
    learner = train(new_learner("class-means", average=0.9))
    network, means = averaged(learner).requires_grad_(False), []
    for task, (x, y) in stored(learner).items():
        assert len(y), task
        for label in range(CLASSES[task]):
            features = [network(each[None])[0] for each in x[y == label]]
            unit = [feature / feature.norm() for feature in features]
            means.append(torch.stack(unit).mean(dim=0) if unit else torch.full((5,), torch.inf))
    expected = []
    for x in X:
        feature = network(x[None])[0]
        distances = [(feature / feature.norm() - mean / mean.norm()).norm().nan_to_num(torch.inf) for mean in means]
        expected.append(int(torch.stack(distances).argmin()))
    assert len(set(expected)) > 3
    assert learner.predict(X).tolist() == expected


@scenarios
def test_balanced_heads_are_fine_tuned_on_memory_alone(scenario: Scenario) -> None:
    learner = train(new_learner({"name": "balanced-heads", "steps": 3, "learning_rate": 0.1}, scenario))
    network = deepcopy(learner.model.backbone).eval()
    heads = {name: deepcopy(task.head) for name, task in learner.tasks.items()}
    before = deepcopy([task.head.state_dict() for task in learner.tasks.values() if task.head is not None])
    optimizer = torch.optim.Adam([p for head in heads.values() for p in head.parameters()], lr=0.1)
    for _ in range(3):
        losses: dict[str, list[Tensor]] = {"all": []} if scenario == "class" else {name: [] for name in heads}
        for task, (x, y) in stored(learner).items():
            for label in y.unique():
                features = network(x[y == label]).detach()
                if scenario == "class":
                    logits, target = torch.cat([head(features) for head in heads.values()], dim=1), label
                    target = label + learner.tasks[task].offset
                else:
                    logits, target = heads[task](features), label
                loss = torch.stack([cross_entropy(row, target) for row in logits]).mean()
                losses["all" if scenario == "class" else task].append(loss)
        optimizer.zero_grad()
        torch.stack([torch.stack(each).mean() for each in losses.values()]).sum().backward()
        optimizer.step()
    task = None if scenario == "class" else "b"
    with torch.no_grad():
        expected = torch.cat([head(network(X)) for head in ([heads["b"]] if task else heads.values())], dim=1)
    torch.testing.assert_close(learner.logits(X, task), expected, rtol=1e-3, atol=1e-4)
    after = [each.head.state_dict() for each in learner.tasks.values() if each.head is not None]
    assert all(torch.equal(one[key], other[key]) for one, other in zip(before, after, strict=True) for key in one)


def test_logits_are_adjusted_by_the_frequencies_of_recent_steps() -> None:
    learner = new_learner({"name": "adjusted", "strength": 0.5, "decay": 0.8})
    frequencies = np.zeros(9)
    for step in range(12):
        ended = [task for task, end in (("a", 4), ("b", 8)) if step > end]
        replayed = {task: stored(learner)[task][1].tolist() for task in ended}
        train(learner, step, step + 1)
        counts, offsets = np.zeros(9), {"a": 0, "b": 3, "c": 5}
        for task, (start, end) in {"a": (0, 4), "b": (0, 8), "c": (5, 99)}.items():
            if start <= step <= end:
                for label in batch(task, step)[1].tolist():
                    counts[offsets[task] + label] += 1.0
        samples = [offsets[task] + label for task, labels in replayed.items() for label in labels]
        for label in samples:
            counts[label] += 4.0 / len(samples)
        frequencies = 0.8 * frequencies + 0.2 * counts / counts.sum()
    shares = frequencies / frequencies.sum()
    expected = trained_logits(learner, X, None) - 0.5 * torch.from_numpy(np.log(shares)).float()
    torch.testing.assert_close(learner.logits(X), expected)
    assert shares[:3].mean() < shares[5:].mean()


@pytest.mark.parametrize("predict_by", OTHERS)
@scenarios
def test_predictions_are_saved_loaded_and_shared_with_a_module(
    predict_by: str, scenario: Scenario, tmp_path: Path
) -> None:
    learner = train(new_learner(predict_by, scenario, average=0.5))
    task = None if scenario == "class" else "a"
    scores = learner.logits(X, task)
    assert not torch.equal(scores, trained_logits(learner, X, task))
    with torch.no_grad():
        torch.testing.assert_close(learner.module(task)(X), scores)
        exported = torch.export.export(learner.module(task), (X,)).module()
        torch.testing.assert_close(exported(X), scores)
    model = Learner.load(learner.model_state(), backbone=backbone())
    assert torch.equal(model.logits(X, task), scores)
    learner.save(tmp_path / "learner")
    assert set(read_checkpoint(tmp_path / "learner")["prediction"]["heads"]) == set(CLASSES)
    loaded = Learner.load(tmp_path / "learner", backbone=backbone())
    assert torch.equal(loaded.logits(X, task), scores)
    assert torch.equal(train(loaded, 12, 14).logits(X, task), train(learner, 12, 14).logits(X, task))


def test_tasks_without_samples_keep_their_latest_heads() -> None:
    learner = train(new_learner("class-means"))
    model = Learner.load(learner.model_state(), backbone=backbone(), memory=BalancedCoreset(20))
    before = learner.logits(X, "a")
    model.add_task("d", classes=2)
    model.step({"d": (X, torch.arange(40) % 2)})
    kept = model._heads._heads["a"].state_dict()["means"]
    assert torch.equal(kept, learner._heads._heads["a"].state_dict()["means"])
    assert model.logits(X).shape == (40, 11)
    assert not torch.equal(model.logits(X, "a"), before)  # features have moved


@pytest.mark.parametrize("kind", [{"name": "adjusted", "strength": 0.0}, {"name": "balanced-heads"}], ids=str)
def test_tasks_without_samples_predict_by_the_present_weights(kind: dict[str, Any]) -> None:
    learner = Learner(backbone(), ER(), memory=BalancedCoreset(2), predict_by=kind)
    compared = 0
    for step in range(12):
        train(learner, step, step + 1)
        for task in learner.tasks:
            scores, expected = learner.logits(X, task), trained_logits(learner, X, task)
            if not len(stored(learner)[task][1]):
                assert torch.equal(scores, expected), f"{task} in step {step}"
                compared += 1
    assert compared > 10


def test_heads_follow_a_step_of_which_only_the_first_update_was_made() -> None:
    losses: list[float] = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) * (losses.pop() if losses else 1.0)

    unadjusted = {"name": "adjusted", "strength": 0.0}
    learner = Learner(backbone(), ER(), memory=BalancedCoreset(20), predict_by=unadjusted, updates=2)
    learner.add_task("a", classes=3, loss=loss)
    learner.step({"a": batch("a", 0)})
    before = learner.logits(X, "a")
    losses[:] = [float("nan")] * 5 + [1.0]
    assert "a" in learner.step({"a": batch("a", 1)}).skipped
    assert not torch.equal(learner.logits(X, "a"), before)
    assert torch.equal(learner.logits(X, "a"), trained_logits(learner, X, "a"))


def test_frequencies_are_in_the_order_of_tasks_in_every_process() -> None:
    learner = Learner(nn.Linear(2, 2), ER(), memory=BalancedCoreset(4), predict_by="adjusted")
    names = [f"task {index}" for index in range(30)]
    for name in names:
        learner.add_task(name, classes=1)
    for _ in range(2):
        learner.step({name: (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)) for name in names})
    assert list(learner.model_state()["prediction"]["predictor"]["frequencies"]) == names


def test_predicting_changes_no_training() -> None:
    through, asked = new_learner("balanced-heads"), new_learner("balanced-heads")
    train(through)
    for step in range(12):
        train(asked, step, step + 1)
        asked.predict(X)
    for mine, theirs in zip(through.model.modules(), asked.model.modules(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_memory_stores_the_logits_of_trained_heads() -> None:
    learner = Learner(
        backbone(), ER(replay_loss="logits"), memory=BalancedCoreset(20), scenario="class", predict_by="class-means"
    )
    train(learner, 0, 5)
    assert learner.memory is not None
    buffer = learner.memory.buffers["a"]
    x, logits = (buffer.take(name) for name in ("x", "logits"))
    features = deepcopy(learner.model.backbone).train()(x)  # batch-norm takes the statistics of the batch
    expected = torch.cat([task.head(features) for task in learner.tasks.values()], dim=1)
    torch.testing.assert_close(logits, expected)


def test_a_class_without_samples_is_never_the_nearest() -> None:
    learner = new_learner("class-means")
    learner.add_task("a", classes=3)
    learner.step({"a": (X, torch.arange(40) % 2)})
    assert learner.predict(X).max() == 1
    assert torch.isfinite(learner.predict_proba(X)).all()


def test_what_cannot_predict_is_refused() -> None:
    with pytest.raises(SpclError, match="predict_by is 'class-means', which needs the samples of a memory"):
        Learner(backbone(), ER(), predict_by="class-means").add_task("a", classes=2)
    with pytest.raises(SpclError, match="there is no predictor 'class-mean'; did you mean 'class-means'"):
        Learner(backbone(), ER(), predict_by="class-mean")
    for wrong in ({"name": "balanced-heads", "steps": 0}, {"name": "adjusted", "decay": 1.0}):
        with pytest.raises(SpclError, match="give"):
            new_learner(wrong)


def test_a_run_is_evaluated_and_exported_by_the_same_heads(tmp_path: Path) -> None:
    method = {"name": "er"}
    path = tiny_run(tmp_path, "run", method, scenario="class", predict_by="class-means", tasks=2, backbone="mlp")
    run = read_run(path)
    again = evaluate_run(run, "cpu")
    assert again.difference == 0.0
    export_run(run, tmp_path / "model.pt2")
    x = torch.randint(0, 256, (5, 1, 18, 18), dtype=torch.uint8)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(x), run.learner("cpu").logits(x), rtol=1e-3, atol=1e-3)
