import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from matrices import normal, relative_difference, with_condition
from spcl.aggregation import gramian, host_gramian
from spcl.aggregation.factors import FactoredGradients
from spcl.aggregation.gramians import gramian_and_numbers
from spcl.errors import SpclError

CONDITIONS = pytest.mark.parametrize("condition", [1e1, 1e2, 1e3, 1e4, 1e6, 1e8])
LENGTH = 50_000


def reference(rows: Tensor) -> Tensor:
    double = rows.double()
    return double @ double.T


def error_of_smallest_eigenvalue(found: Tensor, rows: Tensor) -> float:
    """Return the error relative to the exact value, or to float64 precision where that is larger."""
    singular = torch.linalg.svdvals(rows.double())
    tellable = max(singular[-1].square().item(), 1e-12 * singular[0].square().item())
    return abs(torch.linalg.eigvalsh(found.double())[0] - singular[-1].square()).item() / tellable


# --- Accuracy ---------------------------------------------------------------------------------------------------------


@CONDITIONS
@pytest.mark.parametrize("tasks", [2, 8])
@pytest.mark.parametrize("length", [2048, LENGTH])
def test_smallest_eigenvalue_is_accurate_at_any_condition_number(length: int, tasks: int, condition: float) -> None:
    rows = with_condition(tasks, length, condition).float()
    assert error_of_smallest_eigenvalue(gramian(rows), rows) <= 5e-3


@pytest.mark.parametrize("condition", [1e3, 1e4, 1e6, 1e8])
def test_float32_product_loses_the_smallest_eigenvalue(condition: float) -> None:
    rows = with_condition(2, LENGTH, condition).float()
    assert error_of_smallest_eigenvalue(rows @ rows.T, rows) > 5e-3


@CONDITIONS
def test_smallest_eigenvalue_of_heavy_tailed_gradients(condition: float) -> None:
    rows = (normal(1, LENGTH, 1) ** 3 + normal(4, LENGTH, 2) ** 3 / condition).float()
    assert error_of_smallest_eigenvalue(gramian(rows), rows) <= 2e-2


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_gramian_is_accurate_at_any_scale(scale: float) -> None:
    rows = (scale * normal(3, 5000)).float()
    assert relative_difference(gramian(rows) / scale**2, reference(rows / scale)) <= 1e-6


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_reduced_precision_setting_is_ignored_and_restored(precision: str) -> None:
    rows = normal(4, 100_000).float()
    before, expected = torch.get_float32_matmul_precision(), gramian(rows)
    try:
        torch.set_float32_matmul_precision(precision)
        assert torch.equal(gramian(rows), expected)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cuda.matmul.allow_tf32 == (precision != "highest")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("place", ["cuda", "mkldnn"])
def test_precision_of_one_backend_is_restored(place: str) -> None:
    matmul = getattr(torch.backends, place).matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        gramian(normal(2, 5000).float())
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


# --- Every layout -----------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda rows: rows,
    "rows of a wider buffer": lambda rows: torch.cat([rows, rows], dim=1)[:, : rows.shape[1]],
    "columns of a matrix": lambda rows: rows.T.contiguous().T,
    "every other number": lambda rows: rows.repeat_interleave(2, dim=1)[:, ::2],
    "the same row again": lambda rows: rows[:1].expand_as(rows),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [0, 1, 100, 2047, 2048, 2049, 10_000])
def test_any_layout_and_length(length: int, layout: str) -> None:
    rows = LAYOUTS[layout](normal(3, length).float())
    torch.testing.assert_close(gramian(rows), reference(rows), rtol=1e-6, atol=1e-6 * length)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_exact_to_float64(dtype: torch.dtype) -> None:
    rows = normal(4, 100_000).to(dtype)
    assert relative_difference(gramian(rows), reference(rows)) <= 1e-14


@given(
    st.integers(0, 6),
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=5),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_blocks_equal_their_concatenation(tasks: int, shapes: list[list[int]], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(tasks, *shape, generator=generator, dtype=dtype) for shape in shapes]
    whole = torch.cat([block.reshape(tasks, math.prod(shape)) for block, shape in zip(blocks, shapes, strict=True)], 1)
    found = gramian(blocks)
    assert found.dtype == torch.float64
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, reference(whole), rtol=1e-5, atol=1e-5 * max(whole.shape[1], 1))
    torch.testing.assert_close(gramian(whole), reference(whole), rtol=1e-5, atol=1e-5 * max(whole.shape[1], 1))


def test_ill_conditioned_blocks_use_float64() -> None:
    rows = with_condition(4, LENGTH, 1e5).float()
    blocks = [block.reshape(4, -1, 5) for block in rows.split([10_000, 5, 39_995], dim=1)]
    assert error_of_smallest_eigenvalue(gramian(blocks), rows) <= 5e-3


def test_products_of_samples_that_overflow_are_summed_in_float64() -> None:
    """Samples of opposite signs cancel in the gradients, which are small enough."""
    signs = torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    left, right = signs * torch.tensor([0.5, 0.5, -0.5, -0.5]), 7e18 * (1 + 1e-3 * torch.randn(16, 4))
    factors = FactoredGradients(left, right, (8, 8))
    found, _ = gramian_and_numbers([factors], torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(torch.from_numpy(found), reference(factors.dense().flatten(1)), rtol=1e-4, atol=0.0)


def test_gradients_are_not_modified() -> None:
    rows = normal(3, 5000).float().requires_grad_()
    found = gramian(rows)
    assert not found.requires_grad
    assert rows.grad is None


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([], "at least one gradient tensor, but the sequence is empty"),
        ([torch.ones(2, 3), torch.ones(3, 2)], r"same leading dimension, but their shapes are \[\(2, 3\), \(3, 2\)\]"),
        (torch.tensor(1.0), r"same leading dimension, but their shapes are \[\(\)\]"),
    ],
)
def test_mismatched_gradients_are_named(gradients: Tensor | list[Tensor], message: str) -> None:
    with pytest.raises(SpclError, match=message):
        gramian(gradients)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("length", [100, 5000])
def test_nonfinite_gradient_makes_its_diagonal_entry_nonfinite(length: int, value: float) -> None:
    rows = normal(3, length).float()
    rows[1, 50] = value
    assert gramian(rows).diagonal().isfinite().tolist() == [True, False, True]


def test_host_gramian_accepts_the_asymmetry_of_single_precision() -> None:
    matrix = torch.tensor([[4.0, 1.0], [1.0 + 1e-6, 4.0]])
    torch.testing.assert_close(torch.from_numpy(host_gramian(matrix)), matrix.double())
