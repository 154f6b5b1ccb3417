"""MaxDO by descent against the same on whole gradients."""

import numpy as np
import pytest
import torch
from torch import Tensor

from spcl.aggregation import maxdo_descent_weights, min_norm_weights
from spcl.methods import Gradients, MaxDO


def on_whole_gradients(rows: Tensor) -> Tensor:
    """Five steps of SGD, with step size 50 (10 for two) on a tenth of the normalised distance."""
    tasks = len(rows)
    mask = 1.0 - torch.eye(tasks, dtype=rows.dtype)
    A = torch.full((tasks, tasks), 1.0 / (tasks - 1), dtype=rows.dtype, requires_grad=True)
    optimizer = torch.optim.SGD([A], lr=50.0 if tasks > 2 else 10.0)
    for _ in range(5):
        shares = masked_softmax(A, mask) if tasks > 2 else (A * mask).clamp(0.0, 1.0)
        combined = shares @ rows
        distance = (combined - rows).norm(dim=1).mean()
        loss = 0.1 * distance / (combined.norm(dim=1).mean() + rows.norm(dim=1).mean() + 1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shortest = min_norm_weights(rows @ rows.T)
    if tasks > 2:
        return (masked_softmax(A.detach(), mask).sum(dim=0) + shortest) / (tasks + 1)
    return ((A * shares).detach().sum(dim=0) + shortest).softmax(dim=0)


def masked_softmax(A: Tensor, mask: Tensor) -> Tensor:
    scores = A.exp() * mask
    return scores / scores.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("tasks", [2, 3, 5])
def test_equals_the_descent_on_whole_gradients(tasks: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(tasks, 9, generator=generator, dtype=torch.float64)
        rows *= torch.rand(tasks, 1, generator=generator, dtype=torch.float64) * 3
        torch.testing.assert_close(maxdo_descent_weights(rows @ rows.T), on_whole_gradients(rows))


def test_one_gradient_and_gradients_of_zeros() -> None:
    assert maxdo_descent_weights(torch.tensor([[4.0]])).tolist() == [1.0]
    assert maxdo_descent_weights(torch.zeros(3, 3)).isfinite().all()
    assert maxdo_descent_weights(torch.ones(3, 3)).isfinite().all()


def test_it_is_a_variant_of_the_method() -> None:
    gramian = torch.tensor([[1.0, 0.2, 0.0], [0.2, 4.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    gradients = Gradients(("a", "b", "c"), np.ones(3), gramian)
    torch.testing.assert_close(MaxDO(variant="descent").weigh(gradients).values, maxdo_descent_weights(gramian))
    assert not torch.allclose(MaxDO().weigh(gradients).values, maxdo_descent_weights(gramian))
