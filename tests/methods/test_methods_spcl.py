"""The scale-free method, against the gradients themselves."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spcl.aggregation import solve_condition, solve_scale_free
from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import SORO, SPCL, Gradients, Method, NormSum

SCALES = ("unit", "min", "median", "mean", "norm")


def gradients(tasks: int, seed: int = 0, length: int = 9) -> Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(size=(length, tasks)) * 10.0 ** generator.uniform(-2, 2, tasks))


def update(G: Tensor, kappa: float = 1.5, scale: Any = "median", **options: Any) -> Tensor:
    return G @ solve_scale_free(G.T @ G, max_condition=kappa, scale=scale, **options).weights


@pytest.mark.parametrize("kappa", [1.0, 1.5, 10.0, 1e6])
@pytest.mark.parametrize("tasks", [2, 3, 5])
def test_the_update_is_that_of_clipped_singular_values_of_unit_gradients(tasks: int, kappa: float) -> None:
    G, W = gradients(tasks), torch.rand(tasks, dtype=torch.float64)
    E = G / G.norm(dim=0)
    U, S, Vh = torch.linalg.svd(E, full_matrices=False)
    low, high = solve_condition(E.T @ E, max_condition=kappa).interval
    expected = G.norm(dim=0).log().mean().exp() * U @ torch.diag(S.clamp(low, high)) @ Vh
    torch.testing.assert_close(update(G, kappa, "mean", preference=W), expected @ W)
    adjusted = solve_scale_free(G.T @ G, max_condition=kappa, scale="mean").adjusted
    torch.testing.assert_close(adjusted, expected.T @ expected)
    assert torch.linalg.cond(expected) <= kappa * (1 + 1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_the_direction_does_not_depend_on_the_size_of_a_loss(scale: str) -> None:
    G = gradients(4)
    direction = update(G, scale=scale) / update(G, scale=scale).norm()
    for task in range(4):
        for factor in (1e-3, 0.1, 10.0, 1e3):
            scaled = G.clone()
            scaled[:, task] *= factor
            other = update(scaled, scale=scale)
            torch.testing.assert_close(other / other.norm(), direction)


def test_scales_are_of_the_norms_of_the_gradients() -> None:
    G = gradients(4)
    norms, lengths = G.norm(dim=0).sort().values, {scale: update(G, scale=scale).norm() for scale in SCALES}
    expected = {"unit": 1.0, "min": norms[0], "median": norms[1], "mean": norms.prod() ** 0.25}
    for scale, factor in expected.items():
        torch.testing.assert_close(lengths[scale] / lengths["unit"], torch.as_tensor(factor, dtype=torch.float64))
    torch.testing.assert_close(lengths["norm"], G.sum(dim=1).norm())
    larger = G * torch.tensor([1.0, 1.0, 1.0, 1e3])
    assert update(larger).norm() <= norms[-1] / norms[1] * update(G).norm() * (1 + 1e-9)


def test_one_gradient_stays_and_zeros_are_left_out() -> None:
    g = gradients(1)
    for scale in SCALES[1:]:
        torch.testing.assert_close(update(g, scale=scale), g[:, 0])
    torch.testing.assert_close(update(g, scale="unit"), g[:, 0] / g.norm())
    G = gradients(3)
    padded = torch.cat([G, torch.zeros_like(g)], dim=1)
    torch.testing.assert_close(update(padded), update(G))
    assert torch.equal(solve_scale_free(torch.zeros(2, 2), max_condition=2.0).weights, torch.zeros(2))


def test_gradients_that_agree_up_to_rounding_count_as_those_that_agree() -> None:
    g = gradients(1).float()
    G = torch.cat([g, 3.0 * g * (1.0 + 1e-7), gradients(1, seed=1).float()], dim=1).double()
    exact = torch.cat([g, 3.0 * g, gradients(1, seed=1).float()], dim=1).double()
    torch.testing.assert_close(update(G, 2.0), update(exact, 2.0), rtol=1e-5, atol=1e-5)


def test_a_large_kappa_only_normalises() -> None:
    G = gradients(3)
    names = ("a", "b", "c")
    given = Gradients(names, np.ones(3), G.T @ G)
    torch.testing.assert_close(
        SPCL(kappa=1e9, scale="unit").weigh(given).values, NormSum().weigh(given).values, rtol=1e-9, atol=0.0
    )


# -- a run


def accuracy(method: Method, factor: float = 1.0) -> float:
    """Return the accuracy of three tasks, after a run by SGD in which the loss of one is multiplied by the factor."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
    sgd = partial(torch.optim.SGD, lr=0.05)
    learner = Learner(backbone, method, optimizer=sgd, memory=BalancedCoreset(60), memory_batch=32)
    generator = torch.Generator().manual_seed(1)
    centres = 2.0 * torch.randn(9, 8, generator=generator)

    def batch(task: int, size: int = 32) -> tuple[Tensor, Tensor]:
        y = torch.randint(3, (size,), generator=generator)
        return centres[3 * task + y] + torch.randn(size, 8, generator=generator), y

    for task in range(3):
        scaled = partial(_scaled_loss, factor) if task == 1 else None
        learner.add_task(str(task), classes=3, loss=scaled)
    for step in range(120):
        learner.step({str(task): batch(task) for task in range(3) if task or step < 60})
        if step == 59:
            learner.finish_task("0")
    return sum(learner.evaluate([batch(task, 300)], str(task)) for task in range(3)) / 3


def _scaled_loss(factor: float, logits: Tensor, targets: Tensor) -> Tensor:
    return factor * nn.functional.cross_entropy(logits, targets)


@pytest.mark.parametrize(("weigh_heads", "loss"), [(False, 0.06), (True, 0.02)])  # heads by themselves are not scaled
def test_a_run_is_unharmed_by_the_size_of_a_loss_that_harms_soro(weigh_heads: bool, loss: float) -> None:
    usual = accuracy(SPCL(weigh_heads=weigh_heads))
    assert usual > 0.95
    for factor in (1e-3, 1e3):
        assert accuracy(SPCL(weigh_heads=weigh_heads), factor) > usual - loss
    assert accuracy(SORO(weigh_heads=weigh_heads)) > 0.95
    assert accuracy(SORO(weigh_heads=weigh_heads), 1e-3) < usual - 0.15
