"""What is replayed is what would have been done: the optimiser's step, the penalty, the Gramian, small work in general.

Without a GPU the same code runs, and the work is done eagerly every time.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from spcl.aggregation import gramian
from spcl.engine.eager import augmented
from spcl.engine.graphs.capture import MOST_GRAPHS, WARM_UPS, GraphCache, GraphCapture, _first_cause
from spcl.engine.graphs.engine import AugmentationGraphs, GramianGraphs, PenaltyGraph, UpdateGraphs
from spcl.engine.model import SharedModel
from spcl.engine.rows import GradientMatrix
from spcl.engine.update import Update
from spcl.methods import ER
from spcl.orthogonality import orthogonality_penalty

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def make_model(device: str) -> SharedModel:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 4, 3, stride=2), nn.Flatten())
    return SharedModel(backbone.to(device), "task", nn.Linear, 0, None)


def test_the_reason_is_what_broke_the_capture_and_nothing_that_was_there_before() -> None:
    handled, cause, consequence = KeyError("of the caller"), RuntimeError("a wait"), RuntimeError("no end")
    cause.__context__, consequence.__context__ = handled, cause
    assert _first_cause(consequence, handled) is cause


class WorkItself(GraphCapture):
    """Stands for a GPU where there is none: to replay is to do the work again."""

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]] | None:
        return list(works)


@everywhere
def test_work_is_done_once_a_call_however_it_is_done(device: str) -> None:
    graphs = (GraphCapture if device == "cuda" else WorkItself)(make_model(device))
    cache, done = GraphCache(graphs), torch.zeros(20, device=device)
    calls: Counter[int] = Counter()
    for round_ in range(3 * WARM_UPS):
        for key in range(0, 20, 1 + round_ % 3):
            cache.run(key, lambda key=key: done[key].add_(1))
            calls[key] += 1
    assert done.tolist() == [calls[key] for key in range(20)]
    assert len(cache._replays) == MOST_GRAPHS


def steps(update: UpdateGraphs | None, device: str, changes: bool) -> list[Tensor]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2, device=device)), nn.Parameter(torch.randn(4, device=device))]
    optimizer = torch.optim.Adam(parameters, lr=0.1, fused=True, capturable=True)
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(4 * WARM_UPS):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.copy_(torch.randn(gradient.shape))
        if changes and step == 2 * WARM_UPS:
            optimizer.param_groups[0]["lr"] = 0.01
        if changes and step == 3 * WARM_UPS:
            parameters[1].grad = None
            optimizer.load_state_dict(optimizer.state_dict())
        if update is None:
            optimizer.step()
        else:
            update.run(Update(optimizer))
    return [parameter.detach().cpu() for parameter in parameters]


@everywhere
@pytest.mark.parametrize("changes", [False, True])
def test_an_optimiser_is_stepped_as_if_by_hand_whatever_changes(device: str, changes: bool) -> None:
    captured = steps(UpdateGraphs(GraphCapture(make_model(device))), device, changes)
    for mine, plain in zip(captured, steps(None, device, changes), strict=True):
        torch.testing.assert_close(mine, plain)


@everywhere
def test_an_optimiser_with_hooks_or_not_capturable_is_not_replayed(device: str) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.grad = torch.ones_like(parameter)
    update, seen = UpdateGraphs(GraphCapture(make_model(device))), []
    hooked = torch.optim.Adam([parameter], capturable=True, fused=True)
    hooked.register_step_post_hook(lambda *_: seen.append(1))
    for optimizer in (hooked, torch.optim.SGD([parameter], lr=1.0)):
        for _ in range(2 * WARM_UPS):
            update.run(Update(optimizer))
    assert len(seen) == 2 * WARM_UPS
    assert not update._cache._replays
    assert parameter.tolist() == pytest.approx([1.0 - 2 * WARM_UPS * 1.001] * 2, abs=1e-4)


@everywhere
def test_transforms_may_return_another_type_and_shape(device: str) -> None:
    class Halves:
        capturable = True

        def __call__(self, x: Tensor) -> Tensor:
            return x[..., 1:].float() / 2

    graphs, transform = AugmentationGraphs(make_model(device)), Halves()
    for value in range(2 * WARM_UPS + 1):
        graphs.begin()
        inputs = [torch.full((size, 1, 2, 3), value + size, dtype=torch.uint8, device=device) for size in (2, 5)]
        assert graphs.supports(transform, inputs)
        expected = augmented(transform, inputs, torch.device(device))
        for mine, theirs in zip(graphs.run(transform, inputs), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@everywhere
def test_the_penalty_follows_the_weights(device: str) -> None:
    model = make_model(device)
    rows = GradientMatrix([parameter for parameter in model.backbone.parameters() if parameter.requires_grad])
    penalty = PenaltyGraph(model, rows, GraphCapture(model), ER(alpha=0.5))
    for _ in range(4):
        penalty.graph.run(penalty.work)
        expected = torch.autograd.grad(orthogonality_penalty(model.backbone), rows.parameters, allow_unused=True)
        for view, gradient in zip(rows.views(penalty.gradient), expected, strict=True):
            torch.testing.assert_close(view, torch.zeros_like(view) if gradient is None else 0.5 * gradient)
        with torch.no_grad():
            for parameter in rows.parameters:
                parameter.mul_(0.9)


@needs_gpu
def test_the_gramian_follows_the_rows_on_a_gpu() -> None:
    graphs, rows = GramianGraphs(GraphCapture(make_model("cuda"))), torch.empty(4, 10_000, device="cuda")
    numbers = torch.empty(6, dtype=torch.float64, device="cuda")
    for round_ in range(2 * WARM_UPS):
        for count in (2, 4):
            rows.normal_()
            numbers.fill_(round_)
            if round_ % 2:
                graphs.start(rows[:count], numbers)
            found, others = graphs.start(rows[:count], numbers)()
            torch.testing.assert_close(torch.from_numpy(found), gramian(rows[:count]).cpu())
            assert others.tolist() == [round_] * 6
