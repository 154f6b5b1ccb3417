"""Division by a number that a kernel is told, as a multiplication: a GPU has no instruction that divides integers."""

import triton
import triton.language as tl

__all__ = ["divide", "divisor"]


def divisor(number: int) -> tuple[int, int]:
    """Return what :func:`divide` is told: ⌊2³¹⁺ˢ / d⌋ + 1 and s, the least for which 2ˢ ≥ d.

    >>> factor, shift = divisor(7)
    >>> [(row * factor) >> (31 + shift) for row in (0, 6, 7, 2**31 - 1)] == [0, 0, 1, (2**31 - 1) // 7]
    True
    """
    shift = (number - 1).bit_length()
    return (1 << 31 + shift) // number + 1, shift


@triton.jit
def divide(numbers, factor, shift):
    """Return the quotients, rounded down, of numbers from 0 to 2³¹ − 1."""
    doubled = (2 * numbers.to(tl.uint32)).to(tl.uint32)
    return (tl.umulhi(doubled, factor.to(tl.uint32)) >> shift).to(tl.int32)
