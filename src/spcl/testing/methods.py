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
from spcl.testing.claims import FEATURES, SPANS, STEPS, Claims, batch, left_out, new_backbone, spoilt, state_of, train

MakeMethod = Callable[[], Method]

ROUNDING = 1e-3
"""Relative difference that the order of float32 additions may make over a few steps."""


def check_method(
    make: MakeMethod,
    *,
    random: bool = False,
    permutation: bool = True,
    scaling: int | None = None,
    scenarios: Sequence[Scenario] = ("task", "class"),
) -> None:
    """Check a method: the class, or a function without arguments that makes one.

    Every method: settings round-trip, what is weighed has a finite weight, tasks come and go, training is repeated by
    the same seed and resumed exactly from a checkpoint, a task that is not finite leaves no trace, engines agree, and
    mixed precision and a GPU (where there is one) train as well.

    Args:
        make: makes the method; called often.
        random: whether it draws random numbers. Then its weights do not follow the gradients when these change places,
            and a step that is repeated without a task draws others.
        permutation: whether every gradient keeps its weight in whatever order they come.
        scaling: d, if an update of gradients that are all c times as large is :math:`c^{1+d}` times as large, so that
            their weights are :math:`c^d` times as large: 0 for a mean, -1 for an update of fixed norm. None if neither.
        scenarios: the scenarios that the method is for.
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
    """Weigh gradients of one to four tasks, also if they are zero, equal, opposite, tiny or huge."""
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
    claims.same("weights belong to the gradients, in whatever order (permutation=False if not)", found, expected, 1e-6)


def _check_scaling(claims: Claims, make: MakeMethod, degree: int) -> None:
    rows = torch.randn(3, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = rows if make().reduction == "none" else rows[:2]
    expected = _weigh(claims, make(), rows)
    for factor in (0.125, 8.0):
        found = _weigh(claims, make(), factor * rows) / factor ** (degree + make().elementwise)
        law = f"gradients {factor:g} times as large have weights {factor:g}^{degree} times as large (scaling={degree})"
        claims.same(law, found, expected, 1e-6)


def _weigh(claims: Claims, method: Method, rows: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """Return the weights of gradients, or the update of a method that combines them itself."""
    torch.manual_seed(0)
    if method.elementwise:
        return method.combine(rows.clone())
    order = range(len(rows)) if order is None else order
    is_mean = method.reduction == "mean"
    rows = rows[:2] if is_mean else rows
    names = ("current", "memory")[: len(rows)] if is_mean else tuple(f"task {number}" for number in order)
    gramian = rows @ rows.T
    given = Gradients(
        names=names,
        losses=np.array([1.0 + number for number in order][: len(rows)]),
        gramian=gramian.clone(),
        classes=(2,) * len(names),
        samples=(8,) * len(names),
    )
    weights = method.weigh(given).values
    claims.same("weigh leaves the Gramian as it is", given.gramian, gramian)
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
    """Tasks come and go, with a memory that replays finished tasks, and with one that replays all from the start."""
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
        claims.that(all(bool(each.isfinite().all()) for each in after), law, "weights that are not finite", "finite")
        moved = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        claims.that(moved, law, "a backbone that has not changed", "another one after training")
        again = _learner(make, scenario, memory=new_memory())
        train(again)
        claims.same("the same seed gives the same model", again.model_state(), learner.model_state())


def _check_resuming(claims: Claims, make: MakeMethod, scenario: Scenario) -> None:
    """A learner that is saved, loaded elsewhere and goes on is the one that was never interrupted."""
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
    """A batch that is not finite is skipped, and everything is as if it had not been there."""
    law = f"a task that is not finite leaves no trace ({scenario}-incremental)"
    with claims.law(law):
        learner, other = (_learner(make, scenario, memory=Reservoir(12, seed=1, dtype=torch.float32)) for _ in range(2))
        skipped = [sorted(report.skipped) for report in train(learner, change=spoilt)]
        train(other, change=left_out)
    claims.that(skipped == [[], [], ["b"], *[[]] * (STEPS - 3)], law, f"skipped {skipped}", "['b'] in step 2")
    if not random:
        claims.same(law, state_of(learner), state_of(other))
    finite = all(bool(each.isfinite().all()) for each in _weights_of(learner))
    claims.that(finite, law, "weights that are not finite", "finite")


# -- engines, types and devices


class _FirstInputs(nn.Module):
    """A network that reads the first inputs alone: samples of other lengths need passes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = new_backbone()

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.network(x[:, :FEATURES])
        return features


def _check_engines(claims: Claims, make: MakeMethod, scenario: Scenario) -> None:
    """Train by one pass of all tasks, by a pass of each, and without holding the gradients."""
    law = "engines agree"
    one_pass = _trained(claims, make, scenario)
    apart = _trained(claims, make, scenario, widths={"a": 0, "b": 1, "c": 2})
    claims.same(f"{law}: a pass of each task, and one of all", apart, one_pass, ROUNDING)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        low_memory = _trained(claims, make, scenario, low_memory=True)
    if not said:  # otherwise the learner says why it cannot, and trains with gradients
        claims.same(f"{law}: with the Gramian alone, and with the gradients", low_memory, one_pass, ROUNDING)


def _trained(
    claims: Claims, make: MakeMethod, scenario: Scenario, widths: dict[str, int] | None = None, **options: Any
) -> list[Tensor]:
    """Return the weights after three steps of three tasks, and a memory from the start."""
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
    claims.that(finite, law, "weights that are not finite", "finite")
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
