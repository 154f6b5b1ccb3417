"""The conformance suites of backbones, losses, schedules, transforms and optimisers."""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spcl.batches import map_leaves, number_of_samples
from spcl.learner import Learner
from spcl.losses import Loss, TaskDescription
from spcl.methods import ER, SORO
from spcl.models import InputSpec
from spcl.schedules import Schedule
from spcl.testing.claims import ROUNDING, Claims, new_backbone, train
from spcl.transforms import Transform

CLASSES = 3


# -- backbones


def check_backbone(make: Callable[[InputSpec], nn.Module], x: Any = None) -> None:
    """Check a backbone: ``make(inputs)`` of a module from batches to features.

    Features are finite, have the shape (samples, features) and the declared number; in evaluation each row depends only
    on its own sample, and a non-finite sample shows in its row; every trainable parameter gets a gradient; the same
    seed gives the same network; copies and checkpoints compute the same; mixed precision and a GPU, if there is one,
    work; and a learner trains it by the gradients that a pass per task gives.

    Args:
        make: makes the network for a :class:`spcl.models.InputSpec`.
        x: a batch of eight samples or more, a tensor or a dict or tuple of tensors; by default images of 3×32×32.
    """
    claims = Claims("backbone", make)
    x = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)) if x is None else x

    def new() -> nn.Module:
        torch.manual_seed(0)
        with claims.law("it can be made"):
            made = make(InputSpec.of(x))
        claims.that(isinstance(made, nn.Module), "it is a module", repr(made), "a torch.nn.Module")
        return made

    _check_features(claims, new, x)
    _check_rows(claims, new, x)
    _check_network_state(claims, new, x)
    _check_types_and_devices(claims, new, x)
    _check_learning(claims, new, x)


def _check_features(claims: Claims, new: Callable[[], nn.Module], x: Any) -> None:
    samples, before = number_of_samples(x), map_leaves(torch.clone, x)
    model = new()
    with claims.law("it computes features"):
        features = model(x)
        features.sum().backward()
    claims.same("inputs do not change", _leaves(x), _leaves(before))
    shape = tuple(features.shape)
    law = "there is one row per sample"
    claims.that(len(shape) == 2 and shape[0] == samples, law, f"shape {shape}", f"({samples}, features)")
    claims.that(features.is_floating_point(), "features are floats", features.dtype, "a floating-point type")
    claims.that(bool(features.isfinite().all()), "features are finite", "NaN or infinity", "finite numbers")
    declared = getattr(model, "feature_dim", None)
    claims.that(declared in (None, shape[1]), "feature_dim is the number of features", declared, shape[1])
    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    without = [name for name, weight in trainable.items() if weight.grad is None]
    claims.that(not without, "every trainable parameter has a gradient", f"none for {without[:3]}", "one each")
    gradients = {name: weight.grad for name, weight in trainable.items() if weight.grad is not None}
    spoilt = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    claims.that(not spoilt, "gradients are finite", f"NaN or infinity for {spoilt[:3]}", "finite numbers")


def _check_rows(claims: Claims, new: Callable[[], nn.Module], x: Any) -> None:
    law = "in evaluation a row depends only on its own sample"
    model, samples = new().eval(), number_of_samples(x)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1))
    with claims.law(law), torch.no_grad():
        features = model(x)
        claims.same("evaluation is repeatable", model(x), features)
        claims.same(law, model(map_leaves(lambda leaf: leaf[order], x)), features[order], 1e-3)
        claims.same(law, model(map_leaves(lambda leaf: leaf[:1], x)), features[:1], 1e-3)
        if not all(leaf.is_floating_point() for leaf in _leaves(x)):
            return
        spoilt = model(map_leaves(lambda leaf: _with_nan(leaf, 1), x))
        claims.same(law, torch.cat([spoilt[:1], spoilt[2:]]), torch.cat([features[:1], features[2:]]), 1e-3)
    claims.that(not spoilt[1].isfinite().all(), "a non-finite sample shows", "finite features of NaN", "NaN")


def _with_nan(values: Tensor, sample: int) -> Tensor:
    """Return a copy of the values in which one sample is NaN."""
    return values.index_fill(0, torch.tensor(sample), math.nan)


def _check_network_state(claims: Claims, new: Callable[[], nn.Module], x: Any) -> None:
    model, again = new().eval(), new().eval()
    claims.same("the same seed gives the same network", again.state_dict(), model.state_dict())
    with torch.no_grad():
        expected = model(x)
        law = "a copy computes the same"
        with claims.law(law):
            claims.same(law, deepcopy(model)(x), expected)
        law = "its weights are in its state_dict"
        with claims.law(law):
            for parameter in again.parameters():
                parameter.add_(1.0)
            again.load_state_dict(model.state_dict())
            claims.same(law, again(x), expected)


def _check_types_and_devices(claims: Claims, new: Callable[[], nn.Module], x: Any) -> None:
    law = "it computes finite features in mixed precision"
    with claims.law(law), torch.autocast("cpu", torch.bfloat16):
        features = new()(x)
        features.float().sum().backward()
    claims.that(bool(features.isfinite().all()), law, "NaN or infinity", "finite numbers")
    if torch.cuda.is_available():
        law = "a GPU computes the same features as the CPU"
        with claims.law(law), torch.no_grad():
            found = new().eval().cuda()(map_leaves(lambda leaf: leaf.cuda(), x))
            claims.same(law, found, new().eval()(x), 1e-2)


def _check_learning(claims: Claims, new: Callable[[], nn.Module], x: Any) -> None:
    law = "it trains with a learner"
    half, rate = number_of_samples(x) // 2, 1.0  # a large one: rounding of weights counts less
    parts = [map_leaves(lambda leaf: leaf[:half], x), map_leaves(lambda leaf: leaf[half : 2 * half], x)]
    y = torch.arange(half) % 2
    with TemporaryDirectory() as folder, claims.law(law):
        learner = Learner(new(), SORO(), optimizer=partial(torch.optim.SGD, lr=rate))
        for name in "ab":
            learner.add_task(name, classes=2)
        heads = {name: deepcopy(task.head) for name, task in learner.tasks.items()}
        report = learner.step({"a": (parts[0], y), "b": (parts[1], y)})
        claims.that(not report.skipped, law, f"skipped {dict(report.skipped)}", "no task skipped")
        alone, again = new(), new()
        for (name, head), part in zip(heads.items(), parts, strict=True):
            assert head is not None
            torch.autograd.backward(report.weights[name] * nn.functional.cross_entropy(head(alone(part)), y))
        if torch.equal(again(parts[0]), again(parts[0])):  # a random network makes other passes
            pairs = zip(alone.parameters(), learner.model.backbone.parameters(), strict=True)
            moves = [(one.grad, (one - other).detach() / rate) for one, other in pairs if one.grad is not None]
            expected, found = (torch.cat([each.flatten() for each in side]) for side in zip(*moves, strict=True))
            claims.same("the learner and a pass per task give the same gradients", found, expected, ROUNDING)
        learner.save(path := Path(folder) / "checkpoint")
        loaded = Learner.load(path, backbone=new())
        claims.same("a checkpoint restores it", loaded.logits(x, "a"), learner.logits(x, "a"))


def _leaves(x: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    map_leaves(lambda leaf: leaves.append(leaf) or leaf, x)  # type: ignore[func-returns-value]
    return leaves


# -- losses


def check_loss(make: Callable[[TaskDescription], Loss], kind: str = "classification") -> None:
    """Check a loss: ``make(task)`` of a function of (output, targets).

    It is a finite scalar with a finite gradient, the mean over the samples in any order, and non-finite if an output
    is.

    Args:
        make: makes the loss of a task.
        kind: the task's kind: ``"classification"``, ``"regression"`` or ``"multilabel"``.
    """
    claims = Claims("loss", make)
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(8, CLASSES, generator=generator)
    targets, width = {
        "classification": (torch.arange(8) % CLASSES, CLASSES),
        "regression": (torch.randn(8, CLASSES, generator=generator), None),
        "multilabel": (torch.randint(2, (8, CLASSES), generator=generator).float(), CLASSES),
    }[kind]
    counts, names = ((4, 2, 2), ("one", "two", "three")) if kind == "classification" else (None, None)
    task = TaskDescription("checked", kind, width, counts, names)  # type: ignore[arg-type]
    with claims.law("it can be made"):
        loss = make(task)

    def value(output: Tensor, targets: Tensor) -> Tensor:
        with claims.law("it takes outputs and targets"):
            return loss(output, targets)

    leaf = output.clone().requires_grad_()
    found = value(leaf, before := targets.clone())
    claims.that(found.shape == (), "it is a scalar", f"shape {tuple(found.shape)}", "shape ()")
    claims.that(bool(found.isfinite()), "it is finite", found.item(), "a finite number")
    claims.same("its arguments do not change", [leaf.detach(), targets], [output, before])
    with claims.law("it has a gradient"):
        (gradient,) = torch.autograd.grad(found, leaf)
    claims.that(bool(gradient.isfinite().all()), "its gradient is finite", gradient.tolist(), "finite numbers")
    claims.that(bool(gradient.any()), "its gradient is not zero", "zero at random outputs", "a non-zero gradient")
    law = "it is the mean over the samples"
    expected = found.detach()
    claims.same(f"{law}, in any order", value(output.flip(0), targets.flip(0)), expected, 1e-5)
    claims.same(f"{law}, not their sum", value(output.repeat(2, 1), torch.cat([targets, targets])), expected, 1e-5)
    halves = [value(output[rows], targets[rows]) for rows in (slice(0, CLASSES), slice(CLASSES, 2 * CLASSES))]
    both = value(output[: 2 * CLASSES], targets[: 2 * CLASSES])  # both halves have one sample of each class
    claims.same(f"{law}, also of two halves", torch.stack(halves).mean().detach(), both, 1e-5)
    for number in (math.nan, math.inf):
        found = value(output.index_fill(0, torch.tensor(2), number), targets)
        law = "a non-finite output shows"
        claims.that(not found.isfinite(), law, f"{found.item()} for an output of {number}", "a non-finite loss")
    for dtype in (torch.float64, torch.bfloat16):
        other = targets.to(dtype) if targets.is_floating_point() else targets
        claims.same(f"it is the same in {dtype}", value(output.to(dtype), other).float(), expected, 3e-2)


# -- schedules


def check_schedule(make: Callable[[int], Schedule]) -> None:
    """Check a schedule: ``make(steps)`` of a function from step to factor.

    Every factor is a finite number of at least 0 and depends only on the step; it is defined after the last step, too.
    """
    claims = Claims("schedule", make)
    for steps in (1, 2, 10, 1000):
        with claims.law("it can be made"):
            schedule, other = make(steps), make(steps)
        with claims.law("it has a factor for every step, and after the last one"):
            factors = [schedule(step) for step in range(steps + 3)]
            backwards = [other(step) for step in reversed(range(steps + 3))][::-1]
        for step, factor in enumerate(factors):
            valid = isinstance(factor, int | float) and math.isfinite(factor) and factor >= 0.0
            law = "every factor is a finite number of at least 0"
            claims.that(valid, law, f"{factor} in step {step} of {steps}", "a number ≥ 0")
        claims.same("a factor depends only on the step", backwards, factors)


# -- transforms


def check_transform(make: Callable[[], Transform], x: Any = None) -> None:
    """Check a transform: ``make()`` of a function of the inputs of a batch.

    It returns as many samples as it gets, one or more, of the same shape and type (bytes may become floats), finite
    and, for bytes, within 0…255; a non-finite sample shows; it does not change its inputs; and it draws only from
    PyTorch's generator.

    Args:
        make: makes the transform.
        x: a batch, a tensor or a dict or tuple of tensors; by default images of 3×16×16, as bytes and as floats.
    """
    claims = Claims("transform", make)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (6, 3, 16, 16), generator=generator, dtype=torch.uint8)
    for inputs in (images, images / 255.0) if x is None else (x,):
        with claims.law("it can be made"):
            transform, other = make(), make()
        before = map_leaves(torch.clone, inputs)
        torch.manual_seed(1)
        with claims.law("it takes a batch"):
            found = transform(inputs)
            torch.manual_seed(1)
            again = other(inputs)
        claims.same("inputs do not change", _leaves(inputs), _leaves(before))
        claims.same("it draws only from PyTorch's generator", _leaves(again), _leaves(found))
        for one, given in zip(_leaves(found), _leaves(inputs), strict=True):
            claims.that(one.shape == given.shape, "samples keep their shape", tuple(one.shape), tuple(given.shape))
            kept = one.is_floating_point() == given.is_floating_point() or given.dtype == torch.uint8
            claims.that(kept, "samples keep their type", one.dtype, given.dtype)
            claims.that(bool(one.isfinite().all()), "samples are finite", "NaN or infinity", "finite numbers")
            if given.dtype == torch.uint8:
                low, high = one.min().item(), one.max().item()
                law = "bytes stay within 0…255"
                claims.that(low >= 0 and high <= 255, law, f"{low:g} to {high:g}", "0 to 255")
        law = "a single sample keeps its shape"
        with claims.law(law):
            shapes = [tuple(leaf.shape) for leaf in _leaves(transform(map_leaves(lambda leaf: leaf[:1], inputs)))]
        claims.same(law, shapes, [(1, *leaf.shape[1:]) for leaf in _leaves(inputs)])
        if all(leaf.is_floating_point() for leaf in _leaves(inputs)):
            spoilt = _leaves(transform(map_leaves(lambda leaf: _with_nan(leaf, 1), inputs)))
            shows = any(not leaf[1].isfinite().all() for leaf in spoilt)
            claims.that(shows, "a non-finite sample shows", "finite inputs instead of NaN", "NaN")


# -- optimisers


def check_optimizer(make: Callable[..., Optimizer]) -> None:
    """Check an optimiser: ``make(parameters, lr=…)``.

    It minimises a parabola at the given learning rate, does not change parameters without a gradient, trains new groups
    (of heads), and resumes exactly from its state, also within a learner's checkpoint.
    """
    claims = Claims("optimizer", make)

    def new(parameters: list[nn.Parameter], lr: float = 0.05) -> Optimizer:
        with claims.law("it can be made"):
            made = make(parameters, lr=lr)
        claims.that(isinstance(made, Optimizer), "it is an optimiser", repr(made), "a torch.optim.Optimizer")
        return made

    def descend(optimizer: Optimizer, weight: nn.Parameter, steps: int) -> None:
        for _ in range(steps):
            weight.grad = 2.0 * weight.detach()
            optimizer.step()

    weight, still = nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.ones(2))
    optimizer = new([weight, still])
    rate = optimizer.param_groups[0].get("lr")
    claims.that(float(rate or 0.0) == 0.05, "it has the given learning rate", rate, 0.05)
    with claims.law("it minimises a parabola"):
        descend(optimizer, weight, 20)
    law = "it minimises a parabola"
    claims.that(bool(weight.norm() < 5**0.5), law, f"|w| = {weight.norm():.3g} after 20 steps", "less than at first")
    claims.same("parameters without a gradient stay", still.detach(), torch.ones(2))
    law, late = "it trains new groups of parameters", nn.Parameter(torch.ones(1))
    with claims.law(law):
        optimizer.add_param_group({"params": [late]})
        descend(optimizer, late, 5)
    claims.that(bool(late != 1.0), law, "an unchanged parameter", "a parameter changed by its gradient")
    law = "it resumes exactly from its state"
    one, other = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    first, second = new([one]), new([other])
    with claims.law(law):
        descend(first, one, 5)
        state = deepcopy(first.state_dict())
        with torch.no_grad():
            other.copy_(one)
        second.load_state_dict(state)
        descend(first, one, 5)
        descend(second, other, 5)
    claims.same(law, other.detach(), one.detach())
    law = "a learner with it resumes exactly"
    with TemporaryDirectory() as folder, claims.law(law):
        learner = Learner(new_backbone(), ER(), optimizer=new)
        train(learner, 0, 4)
        learner.save(path := Path(folder) / "checkpoint")
        loaded = Learner.load(path, backbone=new_backbone(), optimizer=new)
        for each in (learner, loaded):
            train(each, 4)
        claims.same(law, loaded.model_state(), learner.model_state())
