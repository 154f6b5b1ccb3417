"""GradDrop: its expectation, its random numbers, and its memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spcl.methods import GradDrop
from spcl.methods.graddrop import CHUNK


def repeated(entries: list[float], times: int) -> Tensor:
    return torch.tensor(entries).unsqueeze(1).repeat(1, times)


@pytest.mark.parametrize(
    "entries", [[3.0, -1.0, -0.5], [0.2, 0.0, -5.0], [1.0, 1.0, 2.0], [-1.0, -2.0, 0.0], [0.0, 0.0]]
)
@pytest.mark.parametrize("leak", [0.0, 0.25])
def test_graddrop_by_its_expectation(entries: list[float], leak: float) -> None:
    times = 40_000
    u = GradDrop(leak=leak).combine(repeated(entries, times)).double()
    positive, negative = sum(g for g in entries if g > 0), sum(g for g in entries if g < 0)
    values = [leak * (positive + negative) + (1 - leak) * side for side in (positive, negative)]
    assert all(min(abs(found - value) for value in values) < 1e-5 for found in u.unique().tolist())
    magnitude = sum(abs(g) for g in entries)
    purity = 0.5 * (1.0 + sum(entries) / magnitude) if magnitude else 0.5
    expected = purity * values[0] + (1 - purity) * values[1]
    assert expected == pytest.approx(sum(entries))  # in the mean it is the plain sum
    deviation = abs(values[0] - values[1]) * (purity * (1 - purity) / times) ** 0.5
    assert u.mean().item() == pytest.approx(expected, abs=5 * deviation + 1e-5)


def test_graddrop_scales_with_the_gradients_and_ignores_their_order() -> None:
    G = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    u = GradDrop(leak=0.5).combine(G.clone())
    torch.testing.assert_close(GradDrop(leak=0.5).combine(8.0 * G), 8.0 * u)
    torch.testing.assert_close(GradDrop(leak=0.5).combine(G[[3, 1, 0, 2]]), u)


def test_graddrop_draws_anew_in_every_step_and_goes_on_from_its_state() -> None:
    G = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    method = GradDrop(seed=7)
    updates = [method.combine(G.clone()).clone() for _ in range(3)]
    assert not torch.equal(updates[0], updates[1])
    assert not torch.equal(updates[0], GradDrop(seed=8).combine(G.clone()))
    other = GradDrop(seed=7)
    other.load_state_dict({"steps": 2})
    before = torch.get_rng_state()
    assert torch.equal(other.combine(G.clone()), updates[2])
    assert torch.equal(torch.get_rng_state(), before)


class LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest new tensor has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.element_size())
        return result


def test_graddrop_holds_no_second_matrix() -> None:
    T, n = 3, 4 * CHUNK + 5
    G = torch.randn(T, n)
    whole = G.clone()
    with LargestResult() as largest:
        u = GradDrop().combine(G)
    assert largest.numbers <= T * CHUNK
    positive, negative = whole.clamp(min=0).sum(dim=0), whole.clamp(max=0).sum(dim=0)
    assert bool(((u == positive) | (u == negative)).all())
