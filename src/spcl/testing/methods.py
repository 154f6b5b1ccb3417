"""The conformance suite of methods."""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset, Memory, Reservoir
from spcl.methods import FAMILIES, Gradients, Method
from spcl.testing.claims import (
    FEATURES,
    ROUNDING,
    SPANS,
    STEPS,
    Claims,
    batch,
    left_out,
    new_backbone,
    spoilt,
    state_of,
    train,
)

MakeMethod = Callable[[], Method]


def check_method(
    make: MakeMethod,
    *,
    random: bool = False,
    permutation: bool = True,
    scaling: int | None = None,
    scenarios: Sequence[Scenario] = ("task", "class"),
) -> None:
    """Check a method: the class, or a function without arguments that makes one.

    Settings survive JSON; every gradient gets a finite weight; tasks may come and go; the same seed repeats the
    training; a checkpoint resumes it exactly; a task with non-finite inputs leaves no trace; all engines agree; and
    training works in mixed precision and on a GPU, if there is one.

    Args:
        make: makes the method; called often.
        random: whether the method draws random numbers. If so, reordered gradients may get other weights, and a step
            that is repeated without a task may draw other numbers.
        permutation: whether a gradient's weight is independent of the order of the gradients.
        scaling: d, if multiplying all gradients by c multiplies their weights by :math:`c^d`: 0 for a mean, -1 for an
            update of fixed norm. None if there is no such d.
        scenarios: the scenarios to check.
    """
    claims = Claims("method", make)
    with claims.law("it can be made"):
        made = make()
    claims.that(isinstance(made, Method), "it is a method", repr(made), "an instance of spcl.methods.Method")
    _check_declarations(claims, made)
    _check_settings(claims, make)
    if made.reduction != "sum":
        _check_weights(claims, make)
        if permutation and not random and made.reduction == "none":
            _check_permutation(claims, make)
        if scaling is not None:
            _check_scaling(claims, make, scaling)
    for scenario in scenarios:
        _check_training(claims, make, scenario)
        _check_resuming(claims, make, scenario)
        _check_non_finite(claims, make, scenario, random)
    _check_engines(claims, make, scenarios[0])
    _check_types_and_devices(claims, make, scenarios[0])


def _check_declarations(claims: Claims, made: Method) -> None:
    law = "it declares what it is"
    claims.that(isinstance(getattr(made, "name", None), str), law, f"name = {getattr(made, 'name', None)!r}", "a text")
    family = getattr(type(made), "family", None)
    known = [*FAMILIES, "TorchJD"]
    claims.that(family is None or family in known, law, f"family = {family!r}", f"one of {', '.join(known)}, or none")


def _check_settings(claims: Claims, make: MakeMethod) -> None:
    law = "its settings round-trip through JSON"
    with claims.law(law):
        made = make()
        settings = json.loads(json.dumps(made.settings.model_dump(mode="json")))
        again = type(made)(**settings)
    claims.same(law, again.settings.model_dump(), made.settings.model_dump())
    claims.same("it is always made with the same settings", make().settings.model_dump(), made.settings.model_dump())
    try:
        type(made)(**settings, no_such_setting=1)
    except SpclError:
        return
    claims.that(False, "an unknown setting is refused", "no error for no_such_setting=1", "a SpclError")


# -- weights


def _check_weights(claims: Claims, make: MakeMethod) -> None:
    """Weigh one to four gradients, also if they are zero, equal, opposite, tiny or huge."""
    law = "every gradient has a finite weight"
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 5):
        rows = torch.randn(count, 30, generator=generator, dtype=torch.float64)
        for name, changed in {
            "random": rows,
            "tiny": 1e-6 * rows,
            "huge": 1e6 * rows,
            "equal": rows[:1].expand(count, -1),
            "opposite": rows[:1] * torch.tensor([1.0, -1.0, 1.0, -1.0])[:count, None],
            "partly zero": rows * (torch.arange(count) > 0)[:, None],
            "zero": 0.0 * rows,
        }.items():
            with claims.law(f"it takes {count} {name} gradients"):
                weights = _weigh(claims, make(), changed)
            where = f"{weights.tolist()} for {count} {name} gradients"
            claims.that(bool(weights.isfinite().all()), law, where, "finite numbers")


def _check_permutation(claims: Claims, make: MakeMethod) -> None:
    rows = torch.randn(4, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    order = [2, 0, 3, 1]
    found, expected = _weigh(claims, make(), rows[order], order=order), _weigh(claims, make(), rows)
    expected = expected if make().elementwise else expected[order]
    claims.same("weights do not depend on the order of the gradients (else permutation=False)", found, expected, 1e-6)


def _check_scaling(claims: Claims, make: MakeMethod, degree: int) -> None:
    rows = torch.randn(3, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = rows if make().reduction == "none" else rows[:2]
    expected = _weigh(claims, make(), rows)
    for factor in (0.125, 8.0):
        found = _weigh(claims, make(), factor * rows) / factor ** (degree + make().elementwise)
        law = f"multiplying gradients by {factor:g} multiplies weights by {factor:g}^{degree} (scaling={degree})"
        claims.same(law, found, expected, 1e-6)


def _weigh(claims: Claims, method: Method, rows: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """Return the weights of the gradients, or the update of a method that combines them itself."""
    torch.manual_seed(0)
    if method.elementwise:
        return method.combine(rows.clone())
    order = range(len(rows)) if order is None else order
    is_mean = method.reduction == "mean"
    rows = rows[:2] if is_mean else rows
    names = ("current", "memory")[: len(rows)] if is_mean else tuple(f"task {number}" for number in order)
    gramian, losses = rows @ rows.T, np.array([1.0 + number for number in order][: len(rows)])
    given = Gradients(
        names=names,
        losses=losses.copy(),
        gramian=gramian.clone(),
        classes=(2,) * len(names),
        samples=(8,) * len(names),
    )
    weights = method.weigh(given).values
    claims.same("weigh does not change its arguments", [given.gramian, given.losses], [gramian, losses])
    claims.that(
        weights.shape == (len(names),), "every gradient has one weight", tuple(weights.shape), f"shape ({len(names)},)"
    )
    return weights


# -- training


def _learner(
    make: MakeMethod,
    scenario: Scenario = "task",
    *,
    dropout: float = 0.0,
    memory: Memory | None = None,
    **options: Any,
) -> Learner:
    backbone = new_backbone(dropout)
    optimizer = partial(torch.optim.SGD, lr=0.05)
    if memory is None:
        memory = BalancedCoreset(12, seed=1, dtype=torch.float32)
    return Learner(backbone, make(), optimizer=optimizer, memory=memory, memory_batch=6, scenario=scenario, **options)


def _check_training(claims: Claims, make: MakeMethod, scenario: Scenario) -> None:
    """Train while tasks come and go, with a memory that replays finished tasks, and with one that replays all tasks."""
    law = f"it trains while tasks come and go ({scenario}-incremental)"
    for kind, first_replay in ((BalancedCoreset, SPANS["a"][1] + 1), (Reservoir, 1)):
        new_memory = partial(kind, 12, seed=1, dtype=torch.float32)
        with claims.law(law):
            learner = _learner(make, scenario, memory=new_memory())
            before = _weights_of(learner)
            reports = train(learner)
        for step, report in enumerate(reports):
            claims.that(not report.skipped, law, f"skipped tasks {sorted(report.skipped)}", "none skipped")
            expected = {task for task, (start, end) in SPANS.items() if start <= step <= end}
            expected |= {"memory"} if step >= first_replay else set()
            claims.that(report.losses.keys() == expected, law, f"losses of {sorted(report.losses)}", sorted(expected))
            if not learner.method.elementwise:
                claims.that(report.weights.keys() == report.losses.keys(), law, sorted(report.weights), "one each")
        after = _weights_of(learner)
        claims.that(all(bool(each.isfinite().all()) for each in after), law, "non-finite weights", "finite weights")
        moved = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        claims.that(moved, law, "an unchanged backbone", "a backbone changed by training")
        again = _learner(make, scenario, memory=new_memory())
        train(again)
        claims.same("the same seed gives the same model", again.model_state(), learner.model_state())


def _check_resuming(claims: Claims, make: MakeMethod, scenario: Scenario) -> None:
    """Compare a learner that is saved, loaded and trained further with one that was never interrupted."""
    law = f"it resumes exactly ({scenario}-incremental)"
    whole = _learner(make, scenario, dropout=0.2)
    train(whole)
    for pause in (2, 5):
        with TemporaryDirectory() as folder, claims.law(law):
            path = Path(folder) / "checkpoint"
            first = _learner(make, scenario, dropout=0.2)
            train(first, 0, pause)
            first.save(path)
            train(first, pause)
            torch.rand(17)
            second = Learner.load(
                path,
                backbone=new_backbone(0.2),
                method=make(),
                optimizer=partial(torch.optim.SGD, lr=0.05),
                memory=BalancedCoreset(12, dtype=torch.float32),
            )
            train(second, pause)
        claims.same(f"{law}, from step {pause}", second.model_state(), whole.model_state())
    claims.same("saving changes nothing", first.model_state(), whole.model_state())


def _check_non_finite(claims: Claims, make: MakeMethod, scenario: Scenario, random: bool) -> None:
    """Compare training on a non-finite batch, which is skipped, with training without this batch."""
    law = f"a task with non-finite inputs leaves no trace ({scenario}-incremental)"
    with claims.law(law):
        learner, other = (_learner(make, scenario, memory=Reservoir(12, seed=1, dtype=torch.float32)) for _ in range(2))
        skipped = [sorted(report.skipped) for report in train(learner, change=spoilt)]
        train(other, change=left_out)
    claims.that(skipped == [[], [], ["b"], *[[]] * (STEPS - 3)], law, f"skipped {skipped}", "['b'] in step 2")
    if not random:
        claims.same(law, state_of(learner), state_of(other))
    finite = all(bool(each.isfinite().all()) for each in _weights_of(learner))
    claims.that(finite, law, "non-finite weights", "finite weights")


# -- engines, types and devices


class _FirstInputs(nn.Module):
    """A network that reads only the first inputs: samples of different lengths cannot share a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.network = new_backbone()

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.network(x[:, :FEATURES])
        return features


def _check_engines(claims: Claims, make: MakeMethod, scenario: Scenario) -> None:
    """Train by one pass over all tasks, by a pass per task, and without holding the gradients."""
    law = "engines agree"
    one_pass = _trained(claims, make, scenario)
    apart = _trained(claims, make, scenario, widths={"a": 0, "b": 1, "c": 2})
    claims.same(f"{law}: a pass per task, and one over all tasks", apart, one_pass, ROUNDING)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        low_memory = _trained(claims, make, scenario, low_memory=True)
    if not said:  # a warning says that the method needs the gradients themselves
        claims.same(f"{law}: holding only the Gramian, and holding the gradients", low_memory, one_pass, ROUNDING)


def _trained(
    claims: Claims, make: MakeMethod, scenario: Scenario, widths: dict[str, int] | None = None, **options: Any
) -> list[Tensor]:
    """Return the weights after three steps with three tasks and a memory that replays all tasks."""
    with claims.law("it trains with every engine"):
        learner = Learner(
            _FirstInputs(),
            make(),
            optimizer=partial(torch.optim.SGD, lr=0.05),
            memory=Reservoir(12, seed=1, dtype=torch.float32),
            scenario=scenario,
            **options,
        )
        for task in "abc":
            learner.add_task(task, classes=2 + (task == "b"))
        for step in range(3):
            given = {task: batch(task, step) for task in "abc"}
            wider = {task: nn.functional.pad(x, (0, (widths or {}).get(task, 0))) for task, (x, _) in given.items()}
            learner.step({task: (wider[task], given[task][1]) for task in given})
    return _weights_of(learner)


def _check_types_and_devices(claims: Claims, make: MakeMethod, scenario: Scenario) -> None:
    law = "it trains in bfloat16"
    with claims.law(law):
        learner = _learner(make, scenario, autocast=torch.bfloat16)
        skipped = [sorted(report.skipped) for report in train(learner) if report.skipped]
    claims.that(not skipped, law, f"skipped {skipped}", "none skipped")
    finite = all(bool(each.isfinite().all()) for each in _weights_of(learner))
    claims.that(finite, law, "non-finite weights", "finite weights")
    if not torch.cuda.is_available():
        return
    with claims.law("it trains on a GPU"):
        on_gpu = Learner(new_backbone().cuda(), make(), optimizer=partial(torch.optim.SGD, lr=0.05), scenario=scenario)
        on_cpu = Learner(new_backbone(), make(), optimizer=partial(torch.optim.SGD, lr=0.05), scenario=scenario)
        for learner in (on_gpu, on_cpu):
            train(learner)
    claims.same("a GPU trains as the CPU does", _weights_of(on_gpu), _weights_of(on_cpu), 1e-2)


def _weights_of(learner: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.backbone.parameters()]
