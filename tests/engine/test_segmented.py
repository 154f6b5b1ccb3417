"""Tensors that wait for what follows them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from spcl.engine import segments
from spcl.engine.layers import Followers
from spcl.engine.rows import GradientMatrix, ReductionPlan
from spcl.engine.segmented import DeferredTensors
from spcl.engine.segments import UnsupportedError


class Images:
    """Images whose computation is noted."""

    def __init__(self) -> None:
        self.value = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.calls: list[Followers] = []

    def compute(self, followers: Followers) -> Tensor:
        self.calls.append(followers)
        result = self.value if followers.addend is None else self.value + followers.addend
        result = result.relu() if followers.relu else result
        return functional.max_pool2d(result, 2) if followers.pool else result


@pytest.fixture
def images() -> Images:
    return Images()


def call(deferred: DeferredTensors, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a mode does with a function call."""
    placeholder = deferred.follow(function, args, kwargs)
    if placeholder is not None:
        return placeholder
    args, kwargs = deferred.resolved(args, kwargs)  # type: ignore[assignment]
    return function(*args, **kwargs)


def value(deferred: DeferredTensors, tensor: Tensor) -> Tensor:
    return deferred.resolved([tensor], {})[0][0]


def test_a_tensor_is_computed_once_and_by_itself_where_nothing_follows(images: Images) -> None:
    deferred = DeferredTensors()
    held = deferred.add(images.value, images.compute)
    ((resolved, [again]), named) = deferred.resolved([held, [held]], {"x": held})
    assert resolved is again is named["x"] is images.value
    assert len(images.calls) == 1


@pytest.mark.parametrize("functions", [("relu",), ("add",), ("add", "relu"), ("relu", "pool"), ("add", "relu", "pool")])
def test_what_follows_is_computed_together_as_far_as_it_can_be(images: Images, functions: tuple[str, ...]) -> None:
    deferred, other = DeferredTensors(), torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    held, plain = deferred.add(images.value, images.compute), images.value
    for function in functions:
        if function == "add":
            held, plain = call(deferred, Tensor.__add__, other, held), other + plain
        elif function == "relu":
            held, plain = call(deferred, functional.relu, held), plain.relu()
        else:
            held = call(deferred, functional.max_pool2d, held, 2, 2, padding=0)
            plain = functional.max_pool2d(plain, 2)
    torch.testing.assert_close(value(deferred, held), plain)
    (followers,) = images.calls
    assert followers.relu == ("relu" in functions)
    assert (followers.addend is not None) == ("add" in functions)
    assert followers.pool == (functions == ("relu", "pool"))


@pytest.mark.parametrize("options", [(3,), (2, 1), (2, 2, 1), (2, 2, 0, 2), (2, 2, 0, 1, False, True)])
def test_another_pooling_is_computed_by_itself(images: Images, options: tuple[Any, ...]) -> None:
    deferred = DeferredTensors()
    held = call(deferred, functional.relu, deferred.add(images.value, images.compute))
    found, expected = (
        call(deferred, functional.max_pool2d, held, *options),
        functional.max_pool2d(images.value.relu(), *options),
    )
    for mine, theirs in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_tensors_of_another_shape_or_type_are_added_by_themselves(images: Images) -> None:
    for other in (torch.ones(4), torch.ones(2, 3, 4, 4, dtype=torch.float64), 2.0):
        deferred = DeferredTensors()
        held = deferred.add(images.value, images.compute)
        assert torch.equal(call(deferred, torch.add, held, other), images.value + other)
    assert [followers.addend for followers in images.calls] == [None] * 3


def test_two_tensors_that_wait_are_added_by_one_of_them(images: Images) -> None:
    deferred, other = DeferredTensors(), Images()
    one, two = deferred.add(images.value, images.compute), deferred.add(other.value, other.compute)
    result = call(deferred, functional.relu, call(deferred, Tensor.__add__, one, two))
    torch.testing.assert_close(value(deferred, result), (images.value + other.value).relu())
    assert len(images.calls) == len(other.calls) == 1


def test_a_tensor_that_is_added_to_itself_is_computed_once(images: Images) -> None:
    deferred = DeferredTensors()
    held = deferred.add(images.value, images.compute)
    assert torch.equal(call(deferred, torch.add, held, held), 2 * images.value)
    assert len(images.calls) == 1


def test_a_tensor_that_is_used_both_ways_is_refused(images: Images) -> None:
    deferred = DeferredTensors()
    held = deferred.add(images.value, images.compute)
    call(deferred, functional.relu, held)
    with pytest.raises(UnsupportedError, match="used again after a function that is computed together with it"):
        value(deferred, held)


@pytest.mark.parametrize("function", [torch.relu_, Tensor.relu_, Tensor.__iadd__, Tensor.add_])
def test_what_follows_in_place_replaces_the_tensor(images: Images, function: Callable[..., Any]) -> None:
    deferred, other = DeferredTensors(), torch.ones(2, 3, 4, 4)
    held = deferred.add(images.value, images.compute)
    adds = function in (Tensor.__iadd__, Tensor.add_)
    result = call(deferred, function, held, *[other] if adds else [])
    expected = images.value + other if adds else images.value.relu()
    assert value(deferred, held) is value(deferred, result)
    torch.testing.assert_close(value(deferred, held), expected)


@pytest.mark.parametrize("most_cleared", [0, segments.MOST_CLEARED])
def test_products_of_segments_replace_what_rows_held(most_cleared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_CLEARED", most_cleared)
    weight, (left, right) = nn.Parameter(torch.zeros(3, 4)), (torch.randn(10, 3), torch.randn(10, 4))
    gradients = GradientMatrix([nn.Parameter(torch.zeros(2)), weight])
    gradients.begin(ReductionPlan.make(("a", "b"), "none", separate=False))
    gradients.buffer.fill_(torch.nan)
    target = segments.SegmentGradients(gradients, segments.Segments((5, 5), (0, 1)), fresh=True)
    for times in (1, 2):  # a weight that is used twice
        target.add_products(weight, left, right)
        expected = [times * left[part].T @ right[part] for part in (slice(5), slice(5, 10))]
        torch.testing.assert_close(gradients.blocks[weight], torch.stack(expected))
