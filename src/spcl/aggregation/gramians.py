"""Gramians in mixed precision: float32 slices summed in float64, or float64 where the condition number requires it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.factors import FactoredGradients, doubled, factored_products
from spcl.errors import SpclError

Array = NDArray[np.float64]
Block = Tensor | FactoredGradients

SLICE = 2048
SLICE_ERROR = 2.0**-24  # relative error of a slice's product: the unit roundoff of float32
TOLERATED_ERROR = 1e-3  # of the smallest eigenvalue; up to ten times larger where a few entries outweigh the rest
UNDERFLOW = 1e-30  # bound on what underflow in float32 removes from a slice's product
MOST_ROWS = 25  # up to which LAPACK does not divide the problem
DOUBLE_CHUNK, DOUBLE_CHUNK_CUDA = 1 << 16, 1 << 23  # fits a CPU cache; amortises a kernel launch


def gramian(gradients: Tensor | Sequence[Tensor]) -> Tensor:
    r"""Compute the T×T matrix :math:`C_{ij} = g_i \cdot g_j` of T gradients, in float64, on their device.

    Products are computed in float32 over slices of up to 2,048 entries and summed in float64. If rounding could change
    the smallest eigenvalue by about a thousandth (at condition numbers above 100 to 1,000; longer gradients tolerate
    more), they are computed in float64. TF32 and bfloat16 products are never used, whatever PyTorch's settings.

    Args:
        gradients: the gradients as the rows of one T×n matrix, or one tensor of shape (T, …) per parameter. The
            tensors are not concatenated.

    >>> import torch
    >>> gramian(torch.tensor([[3.0, 4.0], [4.0, -3.0]]))
    tensor([[25.,  0.],
            [ 0., 25.]], dtype=torch.float64)
    >>> gramian([torch.tensor([[3.0], [4.0]]), torch.tensor([[4.0], [-3.0]])])
    tensor([[25.,  0.],
            [ 0., 25.]], dtype=torch.float64)
    """
    blocks = _as_blocks(gradients)
    nothing = blocks[0].new_empty(0, dtype=torch.float64)
    matrix, _ = gramian_and_numbers(blocks, nothing)
    return torch.from_numpy(matrix).to(blocks[0].device)


def gramian_and_numbers(blocks: Tensor | Sequence[Block], numbers: Tensor) -> tuple[Array, Array]:
    """Return the :func:`gramian` of a T×n matrix, or of its blocks of columns, and float64 numbers, in one transfer.

    >>> import torch
    >>> gramian_and_numbers(torch.tensor([[3.0, 4.0]]), torch.tensor([0.5, 0.7], dtype=torch.float64))
    (array([[25.]]), array([0.5, 0.7]))
    """
    if not numbers.is_cpu:
        return unpacked_gramian(packed_gramian(blocks, numbers), blocks)
    products, squared_traces = _products(_detached(blocks))
    return _exact_gramian(products, float(squared_traces), _detached(blocks)), numbers.numpy()


def packed_gramian(blocks: Tensor | Sequence[Block], numbers: Tensor) -> Tensor:
    """Compute the device's part of :func:`gramian_and_numbers`, a fixed sequence of kernels for CUDA graphs."""
    products, squared_traces = _products(_detached(blocks))
    return torch.cat([products.view(-1), squared_traces.view(1), numbers])


def unpacked_gramian(
    packed: Tensor, blocks: Tensor | Sequence[Block], total: Callable[[Tensor], Tensor] | None = None
) -> tuple[Array, Array]:
    """Compute the host's part of :func:`gramian_and_numbers`; inexact products are recomputed in float64.

    If several processes hold slices of the columns, ``blocks`` is this process's slice, ``packed`` the sum over all
    processes, and ``total`` sums recomputed products over them.
    """
    blocks = _detached(blocks)
    values, tasks = packed.cpu(), len(blocks[0])
    products, squared_traces = values[: tasks * tasks].view(tasks, tasks), float(values[tasks * tasks])
    return _exact_gramian(products, squared_traces, blocks, total), values[tasks * tasks + 1 :].numpy()


def _detached(blocks: Tensor | Sequence[Block]) -> Sequence[Block]:
    return [blocks.detach()] if isinstance(blocks, Tensor) else blocks


def host_gramian(matrix: Tensor) -> Array:
    """Return the Gramian as a float64 array on the host; raise unless it is square, finite and symmetric.

    >>> import torch
    >>> host_gramian(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: the Gramian must be symmetric, but entry (0, 1) is 2.0 and entry (1, 0) is 3.0
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise SpclError(f"the Gramian must be a square matrix, but its shape is {tuple(matrix.shape)}")
    array: Array = matrix.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(array).all():
        i, j = np.argwhere(~np.isfinite(array))[0]
        raise SpclError(f"the Gramian must be finite, but entry ({i}, {j}) is {array[i, j]}; skip that task")
    if not (array == array.T).all():
        asymmetry = np.abs(array - array.T)
        if asymmetry.max() > 1e-5 * np.abs(array).max():
            i, j = np.unravel_index(int(asymmetry.argmax()), asymmetry.shape)
            raise SpclError(
                f"the Gramian must be symmetric, but entry ({i}, {j}) is {array[i, j]} "
                f"and entry ({j}, {i}) is {array[j, i]}"
            )
    return array


def eigenvectors(matrix: Array) -> tuple[Array, Array]:
    """Return the eigenvalues of a symmetric matrix in ascending order, and the eigenvectors as columns.

    For 32 to 64 rows on a busy machine NumPy takes 20 to 70 ms, because its threads wait for one another; PyTorch takes
    0.1 to 0.3 ms.

    >>> eigenvectors(np.diag([2.0, 1.0]))[0]
    array([1., 2.])
    """
    if len(matrix) <= MOST_ROWS:
        from scipy.linalg.lapack import dsyevd

        eigenvalues, vectors, failed = dsyevd(matrix, lower=1)  # in half the time of NumPy's function around it
        if failed:
            raise np.linalg.LinAlgError("the eigenvalues of the Gramian do not converge")
        return eigenvalues, vectors
    found = torch.linalg.eigh(torch.from_numpy(matrix))
    return found.eigenvalues.numpy(), found.eigenvectors.numpy()


def _products(blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """Return the T×T products, and the sum of the squared traces of their float32 slices; -1 if they are exact."""
    if any(block.dtype != torch.float32 for block in blocks):
        exact = _exact_products(blocks)
        return exact, exact.new_full((), -1.0)
    if are_products_exact():  # setting the precision would take longer
        return _float32_products(blocks)
    with float32_products("ieee"):
        return _float32_products(blocks)


def _float32_products(blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    sliced = [_sliced_products(block) for block in blocks if isinstance(block, Tensor)]
    if factors := [block for block in blocks if isinstance(block, FactoredGradients)]:
        products, scale = factored_products(factors)
        sliced.append((products, scale.square()))
    products, squared_traces = sliced[0]
    for other, squared in sliced[1:]:
        products, squared_traces = products + other, squared_traces + squared
    return products, squared_traces


def _exact_products(blocks: Sequence[Block]) -> Tensor:
    """Return the T×T products, all computed in float64."""
    products = [double_products(block) for block in blocks if isinstance(block, Tensor)]
    if factors := [block for block in blocks if isinstance(block, FactoredGradients)]:
        products.append(factored_products(doubled(factors))[0])
    return sum(products[1:], start=products[0])


def _exact_gramian(
    products: Tensor,
    squared_traces: float,
    blocks: Sequence[Block],
    total: Callable[[Tensor], Tensor] | None = None,
) -> Array:
    """Return the products on the host as a symmetric matrix, recomputed in float64 if they are not exact enough."""
    matrix = _symmetric(products.numpy())
    if not _exact_enough(matrix, squared_traces):
        exact = _exact_products(blocks)
        matrix = _symmetric((exact if total is None else total(exact)).cpu().numpy())
    return matrix


def _symmetric(products: Array) -> Array:
    symmetric: Array = (products + products.T) / 2
    return symmetric


def _as_blocks(gradients: Tensor | Sequence[Tensor]) -> list[Tensor]:
    blocks = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    if not blocks:
        raise SpclError("a Gramian needs at least one gradient tensor, but the sequence is empty")
    for block in blocks:
        if block.ndim == 0 or block.shape[0] != blocks[0].shape[0]:
            raise SpclError(
                f"gradient tensors must have the same leading dimension, but their shapes are "
                f"{[tuple(other.shape) for other in blocks]}"
            )
    return [block.detach().reshape(block.shape[0], math.prod(block.shape[1:])) for block in blocks]


def _sliced_products(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gramian of the rows, and the sum of the squared traces of its float32 slices."""
    tasks, length = rows.shape
    size = _slice_size(length) if rows.is_cpu else SLICE
    whole = length // size * size
    slices = rows[:, :whole].view(tasks, whole // size, size).transpose(0, 1)
    products = torch.bmm(slices, slices.transpose(1, 2))
    if rows.is_cpu and whole == length:
        return _sums_of_slices(products.numpy())
    traces = products.diagonal(dim1=1, dim2=2).sum(dim=1, dtype=torch.float64)
    rest = rows[:, whole:].double()
    return products.sum(dim=0, dtype=torch.float64).addmm_(rest, rest.T), traces.dot(traces)


@lru_cache
def _slice_size(length: int) -> int:
    """Return a slice size that divides the length: the largest from half of ``SLICE`` up, or ``SLICE`` if none does.

    >>> _slice_size(3 * 2000), _slice_size(2048), _slice_size(3 * 2003 + 2)
    (2000, 2048, 2048)
    """
    fewest = -(-length // SLICE)
    sizes = (length // count for count in range(fewest, 2 * fewest) if length % count == 0)
    return next(sizes, SLICE) if length >= SLICE else SLICE


def _sums_of_slices(products: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Return the sum of the products and the sum of their squared traces, by NumPy, which is faster for few numbers."""
    count, tasks, _ = products.shape
    traces: Array = products.reshape(count, tasks * tasks)[:, :: tasks + 1].sum(axis=1, dtype=np.float64)
    total = products.sum(axis=0, dtype=np.float64)
    return torch.from_numpy(total), torch.from_numpy(np.asarray(traces.dot(traces)))


def double_products(rows: Block, columns: int | None = None) -> Tensor:
    """Compute the T×T inner products of the rows of a T×n matrix in float64, a chunk of ``columns`` at a time.

    >>> double_products(torch.tensor([[3.0, 4.0], [4.0, -3.0]]))
    tensor([[25.,  0.],
            [ 0., 25.]], dtype=torch.float64)
    """
    if isinstance(rows, FactoredGradients):
        return factored_products(doubled([rows]))[0]
    chunk = columns or (DOUBLE_CHUNK_CUDA if rows.is_cuda else DOUBLE_CHUNK)
    double = rows[:, :chunk].double()
    products = double @ double.T
    for start in range(chunk, rows.shape[1], chunk):
        double = rows[:, start : start + chunk].double()
        products.addmm_(double, double.T)
    return products


def _exact_enough(matrix: Array, squared_traces: float) -> bool:
    """Return whether rounding errors of the slices, assumed independent, change the smallest eigenvalue negligibly."""
    if squared_traces < 0.0:
        return True
    if not (math.isfinite(squared_traces) and math.isfinite(matrix.sum())):
        return False  # products that overflow in float32 may be finite in float64
    from scipy.linalg.lapack import dpotrf

    error = SLICE_ERROR * squared_traces**0.5 + UNDERFLOW
    shifted = matrix.copy()
    shifted.ravel()[:: len(matrix) + 1] -= error / TOLERATED_ERROR
    _, is_indefinite = dpotrf(shifted, clean=0, overwrite_a=1)  # Cholesky's decomposition, if there is one
    return not is_indefinite


# -- precision of float32 matrix products

FULL = ("ieee", "none")
"""PyTorch's settings that mean full precision."""

HAS_SETTINGS = hasattr(torch.backends.cuda.matmul, "fp32_precision")
"""Whether every kind of device has its own setting; before version 2.9 PyTorch has one for all."""


def are_products_exact() -> bool:
    """Return whether float32 products are computed in full precision, which is the default.

    >>> with float32_products("ieee"):
    ...     are_products_exact()
    True
    """
    if not HAS_SETTINGS:
        return torch.get_float32_matmul_precision() == "highest"
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return gpu.fp32_precision in FULL and cpu.fp32_precision in FULL


@contextmanager
def float32_products(kind: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Compute float32 products within the block in full precision (``ieee``), or on a GPU in TF32 (``tf32``).

    PyTorch's own settings, which may allow TF32 on a GPU and bfloat16 on a CPU, are restored afterwards.

    >>> with float32_products("ieee"):
    ...     product = torch.ones(2, 3) @ torch.ones(3, 2)
    """
    if not HAS_SETTINGS:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if kind == "ieee" else "high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = gpu.fp32_precision, cpu.fp32_precision
    try:
        gpu.fp32_precision, cpu.fp32_precision = kind, "ieee"
        yield
    finally:
        gpu.fp32_precision, cpu.fp32_precision = before
