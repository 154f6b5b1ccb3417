"""One step of the learner against the same step computed by hand, with autograd and no part of the engine."""

import copy
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, mse_loss
from torchjd.aggregation import PCGradWeighting

from _learning import Agreement, Preferences, TinyResNet, batch
from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import ER, SORO, SORODBT, Gradients, Method, Weights, make_method

RATE = 0.1
TASKS = {"a": (6, 3), "b": (9, 2), "c": (4, 4)}  # samples in a batch, classes
Batches = Mapping[str, tuple[Tensor, Tensor]]


def batches(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: batch(*sizes, 10 * seed + index, torch.float64) for index, (name, sizes) in enumerate(TASKS.items())}


def trained_learner(method: Method, scenario: str = "task", memory: bool = True, **options: bool) -> Learner:
    """Three tasks after two steps in float64; with a memory the first is finished and rehearsed."""
    learner = Learner(
        TinyResNet().double(),
        method,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        memory=BalancedCoreset(5) if memory else None,
        memory_batch=4,
        scenario=scenario,
        **options,
    )
    for name, (_, classes) in TASKS.items():
        learner.add_task(name, classes=classes)
    for seed in range(2):
        learner.step(batches(seed))
    if memory:
        learner.finish_task("a")
    return learner


def present(learner: Learner, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: pair for name, pair in batches(seed).items() if name in learner.active_tasks}


class ByHand:
    """Copies of a learner's networks, and one step of SGD on them."""

    def __init__(self, learner: Learner) -> None:
        self.backbone = copy.deepcopy(learner.model.backbone)
        self.heads = nn.ModuleDict({name: copy.deepcopy(task.head) for name, task in learner.tasks.items()})
        self.memory = copy.deepcopy(learner.memory)
        self.joint = learner.scenario == "class"

    def loss(self, features: Tensor, task: str, y: Tensor) -> Tensor:
        if not self.joint:
            return cross_entropy(self.heads[task](features), y, reduction="sum")
        offsets = dict(zip(TASKS, np.cumsum([0, *(classes for _, classes in TASKS.values())]).tolist(), strict=False))
        logits = torch.cat([head(features) for head in self.heads.values()], dim=1)
        return cross_entropy(logits, y + offsets[task], reduction="sum")

    def losses(self, given: Batches) -> list[Tensor]:
        columns = [self.loss(self.backbone(x), task, y) / len(x) for task, (x, y) in given.items()]
        drawn = self.memory.draw(4) if self.memory is not None else []
        if drawn:
            features = self.backbone(torch.cat([part.x for part in drawn])).split([len(part.x) for part in drawn])
            parts = [self.loss(some, part.task, part.y) for some, part in zip(features, drawn, strict=True)]
            columns.append(torch.stack(parts).sum() / sum(len(part.x) for part in drawn))
        return columns

    def step(self, given: Batches, combine: Callable[[Tensor, bool], Tensor], alpha: float = 0.0) -> None:
        shared, own = list(self.backbone.parameters()), list(self.heads.parameters())
        losses = self.losses(given)
        gradients = [torch.autograd.grad(loss, shared + own, allow_unused=True) for loss in losses]
        rows = torch.stack([torch.cat([g.flatten() for g in some[: len(shared)]]) for some in gradients])
        rows += alpha * self.orthogonality_gradient(shared)
        update = combine(rows, len(losses) > len(given))
        with torch.no_grad():
            for parameter, change in zip(shared, update.split([p.numel() for p in shared]), strict=True):
                parameter -= RATE * change.view_as(parameter)
            for index, parameter in enumerate(own, start=len(shared)):
                for some in gradients:
                    if some[index] is not None:
                        parameter -= RATE * some[index]

    def orthogonality_gradient(self, shared: list[nn.Parameter]) -> Tensor:
        """That of ‖conv(K, K) − I‖² over the convolutions, through conv2d."""
        penalty = torch.zeros((), dtype=torch.float64)
        for module in self.backbone.modules():
            if isinstance(module, nn.Conv2d):
                kernel, stride = module.weight, module.stride[0]
                padding = (kernel.shape[-1] - 1) // stride * stride
                correlation = conv2d(kernel, kernel, stride=stride, padding=padding)
                target = torch.zeros_like(correlation)
                target[:, :, padding // stride, padding // stride] = torch.eye(len(kernel))
                penalty = penalty + (correlation - target).square().sum()
        gradients = torch.autograd.grad(penalty, shared, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])


def assert_equals_by_hand(learner: Learner, reference: ByHand, tolerance: float = 1e-9) -> None:
    pairs = [(learner.model.backbone, reference.backbone)]
    pairs += [(task.head, reference.heads[name]) for name, task in learner.tasks.items()]
    for found, expected in pairs:
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(found.state_dict()[key], value, rtol=tolerance, atol=tolerance, msg=key)


def er_by_hand(rows: Tensor, with_memory: bool) -> Tensor:
    if not with_memory:
        return rows.mean(dim=0)
    return (rows[:-1].mean(dim=0) + rows[-1]) / 2


def soro_by_hand(rows: Tensor, with_memory: bool, scale: str = "min") -> Tensor:
    """The paper's Algorithm 1 on the n×T matrix itself; then, as its authors' code does, times σ_min(G)."""
    sigma, lambda_, tolerance = 100.0, 100.0, 1e-3
    G = rows.T
    U, singular, Vh = torch.linalg.svd(G, full_matrices=False)
    adjusted, d, previous = U @ Vh, torch.ones(len(rows), dtype=G.dtype), None
    for iteration in range(101):
        excess = adjusted.T @ adjusted - torch.diag(d)
        objective = float(
            (G - adjusted).square().sum() + sigma * excess.square().sum() + lambda_ * (d - 1).square().sum()
        )
        if iteration == 100 or (previous is not None and previous - objective < tolerance):
            break
        adjusted = adjusted - (2 * (adjusted - G) + 4 * sigma * adjusted @ excess) / (8 * sigma + 2)
        d = (lambda_ + sigma * (adjusted.T @ adjusted).diagonal()) / (lambda_ + sigma)
        previous = objective
    return adjusted.sum(dim=1) * (singular[-1] if scale == "min" else 1.0)


SCENARIOS = pytest.mark.parametrize("scenario", ["task", "class"])
WITH_MEMORY = pytest.mark.parametrize("memory", [False, True], ids=["no memory", "memory"])


@SCENARIOS
@WITH_MEMORY
@pytest.mark.parametrize(
    ("method", "combine", "alpha"),
    [
        (ER, er_by_hand, 0.0),
        (partial(ER, alpha=0.01), er_by_hand, 0.01),
        (SORO, soro_by_hand, 0.0),
        (partial(SORO, scale="unit"), partial(soro_by_hand, scale="unit"), 0.0),
        (partial(SORODBT, alpha=0.01), soro_by_hand, 0.01),
    ],
    ids=["er", "er+dbt", "soro", "soro of unit scale", "soro+dbt"],
)
def test_a_step_is_what_autograd_gives_by_hand(
    method: Callable[[], Method], combine: Callable[[Tensor, bool], Tensor], alpha: float, scenario: str, memory: bool
) -> None:
    learner = trained_learner(method(), scenario, memory)
    for seed in range(2, 5):
        reference = ByHand(learner)
        report = learner.step(present(learner, seed))
        reference.step(present(learner, seed), combine, alpha)
        assert list(report.losses) == [*present(learner, seed), *(["memory"] if memory else [])]
        assert_equals_by_hand(learner, reference)


@SCENARIOS
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_a_step_of_pcgrad_is_what_torchjd_gives_for_the_same_seed(scenario: str, memory: bool) -> None:
    learner = trained_learner(make_method("pcgrad"), scenario, memory)
    conflicts = 0
    for seed in range(2, 5):
        reference = ByHand(learner)
        torch.manual_seed(seed)
        report = learner.step(present(learner, seed))
        torch.manual_seed(seed)
        reference.step(present(learner, seed), pcgrad_by_torchjd)
        assert_equals_by_hand(learner, reference)
        conflicts += report.before.conflicts
    assert conflicts


def pcgrad_by_torchjd(rows: Tensor, with_memory: bool) -> Tensor:
    return PCGradWeighting()(rows @ rows.T) @ rows


class LossWeighted(Method):
    """The mean of the tasks and the memory, weighed by their losses."""

    name = "loss-weighted"
    reduction = "mean"
    uses_gramian = False

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.from_numpy(gradients.losses))


class GramianWeighted(LossWeighted):
    name = "gramian-weighted"
    uses_gramian = True

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(gradients.known_gramian().sum(dim=0).sigmoid())


SETTINGS = [{}, {"alpha": 0.01}, {"alpha": 0.01, "decoupled": True}, {"alpha": 0.1, "adaptive": True}]
LEAN = [ER, Preferences, LossWeighted, GramianWeighted]


@WITH_MEMORY
@pytest.mark.parametrize("broken", ["none", "first", "last"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "alpha", "decoupled", "adaptive"])
@pytest.mark.parametrize("method", LEAN)
def test_a_reduction_gives_the_update_of_the_full_matrix(
    method: type[Method], settings: dict[str, float], broken: str, memory: bool
) -> None:
    lean, full = (trained_learner(method(**settings), memory=memory, measure_stability=full) for full in (False, True))
    given = present(lean, 2)
    if broken != "none":
        name = list(given)[0 if broken == "first" else -1]
        given[name] = (given[name][0] * torch.nan, given[name][1])
    reports = [learner.step(given) for learner in (lean, full)]
    for module, other in zip(lean.model.modules(), full.model.modules(), strict=True):
        torch.testing.assert_close(dict(module.state_dict()), dict(other.state_dict()), rtol=1e-10, atol=1e-10)
    assert reports[0].losses == pytest.approx(reports[1].losses, rel=1e-10)
    assert reports[0].weights == pytest.approx(reports[1].weights, rel=1e-10)
    assert list(reports[0].skipped) == list(reports[1].skipped) == ([] if broken == "none" else [name])
    assert reports[0].before is None
    assert reports[1].before is not None


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "alpha", "decoupled", "adaptive"])
@pytest.mark.parametrize("method", [*LEAN, SORO, Agreement])
def test_the_orthogonality_gradient_enters_as_asked(method: type[Method], settings: dict[str, float]) -> None:
    learner = trained_learner(method(**settings))
    reference = ByHand(learner)
    rule, chosen = copy.deepcopy(learner.method), learner.method.settings
    weights = list(reference.backbone.parameters())
    shared = reference.orthogonality_gradient(weights)

    def combine(rows: Tensor, with_memory: bool) -> Tensor:
        names = ("current", "memory") if rule.reduction == "mean" else ("b", "c", "memory")
        losses = np.array([report.losses[name] for name in ("b", "c", "memory")])
        if rule.reduction == "mean":
            rows = torch.stack([rows[:-1].mean(dim=0), rows[-1]])
            losses = np.array([losses[:-1].mean(), losses[-1]])
        columns = Gradients(names, losses, rows @ rows.T)
        update = rule.combine(rows) if rule.elementwise else rule.weigh(columns).values.double() @ rows
        return update if chosen.coupled else update + penalty(update)

    def penalty(update: Tensor) -> Tensor:
        if not chosen.adaptive:
            return chosen.alpha * shared
        sizes = [weight.numel() for weight in weights]
        parts = zip(weights, update.split(sizes), shared.split(sizes), strict=True)
        return torch.cat([chosen.alpha * u.norm() / max(p.norm(), w.norm()) * p for w, u, p in parts])

    report = learner.step(present(learner, 2))
    reference.step(present(learner, 2), combine, chosen.alpha if chosen.coupled else 0.0)
    assert_equals_by_hand(learner, reference)


def test_a_regression_head_beside_classifiers_gets_its_own_gradient() -> None:
    learner = trained_learner(SORO(), memory=False)
    head = nn.Linear(8, 2).double()
    learner.add_task("speed", head=head, loss=mse_loss)
    x, y = batch(5, 2, 40, torch.float64)[0], torch.ones(5, 2, dtype=torch.float64)
    expected = torch.autograd.grad(mse_loss(head(copy.deepcopy(learner.model.backbone)(x)), y), head.weight)[0]
    before = head.weight.detach().clone()
    learner.step(batches(2) | {"speed": (x, y)})
    torch.testing.assert_close(head.weight.detach(), before - RATE * expected, rtol=1e-9, atol=1e-12)


# -- what is reported


def test_the_report_says_what_the_step_did() -> None:
    learner = trained_learner(SORO())
    reference = ByHand(learner)
    seen: list[Tensor] = []

    def combine(rows: Tensor, with_memory: bool) -> Tensor:
        seen.append(rows)
        return soro_by_hand(rows, with_memory)

    report = learner.step(present(learner, 2))
    reference.step(present(learner, 2), combine)
    (rows,) = seen
    columns = ["b", "c", "memory"]
    assert report.step == 2
    assert list(report.losses) == list(report.weights) == columns
    assert report.skipped == {}
    update = torch.tensor(list(report.weights.values()), dtype=torch.float64) @ rows
    torch.testing.assert_close(update, soro_by_hand(rows, True), rtol=1e-9, atol=1e-12)
    singular = torch.linalg.svdvals(rows)
    assert report.before.condition_number == pytest.approx(float(singular[0] / singular[-1]), rel=1e-8)
    cosines = nn.functional.normalize(rows, dim=1) @ nn.functional.normalize(rows, dim=1).T
    torch.testing.assert_close(report.before.cosines, cosines, rtol=1e-9, atol=1e-9)
    assert report.before.conflicts == int((cosines.triu(1) < 0).sum())
    norms = rows.norm(dim=1)
    similarities = 2 * torch.outer(norms, norms) / (norms[:, None] ** 2 + norms[None, :] ** 2)
    torch.testing.assert_close(report.before.magnitude_similarities, similarities)
    assert report.after.condition_number < report.before.condition_number
    assert report.after.mean_magnitude_similarity > 0.99
    assert set(report.seconds) == {"tasks", "memory", "weighting", "update"}
    assert all(seconds >= 0 for seconds in report.seconds.values())
    assert report.memory_bytes == learner.memory.nbytes > 0


def test_a_report_holds_and_needs_nothing_larger_than_the_gramian() -> None:
    learner = trained_learner(SORODBT())
    report = learner.step(present(learner, 2))
    assert "orthogonality" in report.seconds
    for stability in (report.before, report.after):
        assert stability.gramian.shape == (3, 3)
        assert stability.gramian.untyped_storage().nbytes() == 9 * 8


@pytest.mark.parametrize("method", [SORO(), ER(), make_method("rlw")])  # one of every reduction
def test_what_is_to_be_done_meanwhile_is_done_once_and_before_the_update(method: Method) -> None:
    torch.manual_seed(0)
    backbone = nn.Linear(4, 3)
    learner = Learner(backbone, method)
    for name in ("good", "bad"):
        learner.add_task(name, classes=2)
    seen: list[Tensor] = []
    x, y = torch.randn(6, 4), torch.arange(6) % 2
    before = backbone.weight.detach().clone()
    report = learner.step({"good": (x, y), "bad": (x * torch.nan, y)}, lambda: seen.append(backbone.weight.clone()))
    assert list(report.skipped) == ["bad"]
    assert len(seen) == 1
    assert torch.equal(seen[0], before)
    assert not torch.equal(backbone.weight, before)
    with pytest.raises(ZeroDivisionError):
        learner.step({"good": (x, y)}, lambda: 1 // 0)
    assert learner.steps == 1


def test_a_method_without_gramian_is_measured_only_on_request() -> None:
    assert trained_learner(ER(), memory=False).step(batches(2)).before is None
    report = trained_learner(ER(), memory=False, measure_stability=True).step(batches(2))
    assert report.before.condition_number == pytest.approx(report.after.condition_number)  # all weights are equal
    assert report.after.gramian.shape == (3, 3)


# -- how much memory


@pytest.mark.parametrize(
    ("method", "memory", "rows"),
    [
        (ER(), False, 1),
        (ER(), True, 2),
        (ER(alpha=0.1), True, 3),
        (Preferences(), True, 2),
        (SORO(), False, 3),
        (SORO(), True, 3),
        (SORODBT(), False, 4),
    ],
    ids=str,
)
def test_the_gradient_buffer_has_no_more_rows_than_needed(method: Method, memory: bool, rows: int) -> None:
    learner = trained_learner(method, memory=memory)
    learner.step(present(learner, 2))
    length = sum(parameter.numel() for parameter in learner.model.backbone.parameters())
    buffer = learner._engine.gradients.buffer
    assert buffer.shape == (rows, length)
    for parameter in learner.model.backbone.parameters():
        assert parameter.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_bad_batches_cost_no_further_rows() -> None:
    learner = trained_learner(SORO(), memory=False)
    given = batches(2)
    given["b"] = (given["b"][0] * torch.nan, given["b"][1])
    learner.step(given)
    assert len(learner._engine.gradients.buffer) == 3
