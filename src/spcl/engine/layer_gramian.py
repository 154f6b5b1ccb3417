"""Inner products of gradients, gathered parameter by parameter in a backward pass, so that no T×n numbers are held."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from spcl.aggregation.factors import FactoredGradients
from spcl.aggregation.gramians import double_products
from spcl.engine.gradients import GradientMatrix
from spcl.engine.segments import SegmentGradients, Segments, UnsupportedError, Work
from spcl.engine.side_streams import SideStreams

__all__ = ["LayerGramian", "SegmentGramian"]

LEAST_NUMBERS = 1 << 22
"""Gradients of so many numbers in all are never computed in parts."""

COLUMNS = 1 << 16
"""How many columns are converted to float64 at a time, at most."""

ALL = slice(None)


class LayerGramian:
    r"""The Gramian :math:`C_{st} = \sum_p \langle g_s^p, g_t^p \rangle` of T gradients, summed over the parameters p.

    The T gradients of a parameter are held only until their products are added, in float64. Those of a large parameter
    are computed in slices, so that what is held is no more than one gradient of the network. Only a parameter that a
    pass uses more than once keeps its T gradients until the last use.

    Args:
        gradients: says which rows there are; holds the orthogonality gradient, which is the last of them, if any.

    Attributes:
        products: the T×T products so far, on the device.
    """

    def __init__(self, gradients: GradientMatrix) -> None:
        penalty = gradients.views(gradients.penalty_row) if gradients.has_penalty else []
        self._penalty = dict(zip(gradients.parameters, penalty, strict=bool(penalty)))
        self._rows = gradients.plan.rows + bool(penalty)
        self._length = max(gradients.length, LEAST_NUMBERS) // self._rows
        self._columns = min(COLUMNS, 1 + self._length // 4)
        self._uses: Counter[nn.Parameter] = Counter()
        self._kept: dict[nn.Parameter, Tensor] = {}
        self.products = torch.zeros(self._rows, self._rows, dtype=torch.float64, device=gradients.device)

    def expect(self, parameter: nn.Parameter) -> None:
        """Note that the backward pass will add to the gradients of a parameter once more."""
        self._uses[parameter] += 1

    def accepts_factors(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradients of a parameter may be given as factors."""
        return not self._penalty and self._uses[parameter] == 1 and parameter not in self._kept

    def add_factors(self, parameter: nn.Parameter, rows: Sequence[int], factors: FactoredGradients) -> None:
        """Add the products of the gradients of a parameter, in these rows."""
        self._count_down(parameter)
        places = torch.tensor(rows, device=self.products.device)
        self.products[places.unsqueeze(1), places] += double_products(factors)

    def add(self, parameter: nn.Parameter, rows: Sequence[int], works: Sequence[Work], separable: bool = True) -> None:
        """Add what is computed for these rows to the gradients of a parameter; after its last use, their products."""
        is_last = self._count_down(parameter)
        if is_last and parameter not in self._kept:
            self._add_products(parameter, rows, works, separable)
            return
        if parameter not in self._kept:
            self._kept[parameter] = parameter.new_zeros(self._rows, *parameter.shape)
        for row, work in zip(rows, works, strict=True):
            self._kept[parameter][row] += work()
        if is_last:
            self._release(parameter)

    def finish(self) -> None:
        """Add the products of parameters of which not every use was reached."""
        for parameter in list(self._kept):
            self._release(parameter)

    def _count_down(self, parameter: nn.Parameter) -> bool:
        """Count a use of a parameter; return whether it is the last one."""
        if not self._uses[parameter]:
            raise UnsupportedError("the backward pass reaches a parameter more often than the forward pass has used it")
        self._uses[parameter] -= 1
        return not self._uses[parameter]

    def _release(self, parameter: nn.Parameter) -> None:
        kept = self._kept.pop(parameter)
        self._add_products(parameter, range(len(kept)), [partial(_part, each) for each in kept])

    def _add_products(
        self, parameter: nn.Parameter, rows: Sequence[int], works: Sequence[Work], separable: bool = True
    ) -> None:
        for part in self._parts(parameter) if separable else [ALL]:
            self.products += double_products(self._block(parameter, rows, works, part, separable), self._columns)

    def _block(
        self, parameter: nn.Parameter, rows: Sequence[int], works: Sequence[Work], part: slice, separable: bool
    ) -> Tensor:
        """Return the gradients of a part of a parameter as rows, with the orthogonality gradient as the last one."""
        like = _part(parameter.detach(), part)
        block = like.new_zeros(self._rows, *like.shape)
        for row, work in zip(rows, works, strict=True):
            block[row] = work(part) if separable else work()
        if self._penalty:
            block[-1] = _part(self._penalty[parameter], part)
        return block.view(self._rows, -1)

    def _parts(self, parameter: nn.Parameter) -> list[slice]:
        """Return slices of the first dimension, as few as the rows of each can be held."""
        if parameter.numel() <= self._length:
            return [ALL]
        count = max(1, len(parameter) * self._length // parameter.numel())
        return [slice(start, start + count) for start in range(0, len(parameter), count)]


class SegmentGramian(SegmentGradients):
    """Takes the gradients of the segments of one pass: their products first, their sum in a second backward pass.

    Args:
        gradients: a gradient matrix that holds one row, for the sum.
        segments: of the pass.
        gramian: gathers the products.
    """

    def __init__(self, gradients: GradientMatrix, segments: Segments, gramian: LayerGramian) -> None:
        super().__init__(gradients, segments, fresh=False)
        self._gramian: LayerGramian | None = gramian

    def sum_up(self) -> None:
        """Add the gradients of all segments to the first row from now on."""
        self._gramian = None
        self._use(Segments.of(self.segments.sizes, (0,) * len(self.segments.sizes)))

    @override
    def follow(self, *parameters: Tensor | None) -> Tensor:
        for parameter in parameters:
            if self._gramian is not None and isinstance(parameter, nn.Parameter) and parameter in self:
                self._gramian.expect(parameter)
        return super().follow(*parameters)

    @override
    def add_products(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        if self._gramian is None:
            super().add_products(parameter, left, right)
        elif parameter in self:
            lefts, rights = self.segments.split(left), self.segments.split(right)
            if self._gramian.accepts_factors(parameter) and FactoredGradients.are_faster(left, right, len(lefts)):
                factors = FactoredGradients(left, right, [len(part) for part in lefts])
                self._gramian.add_factors(parameter, self.segments.rows, factors)
            else:
                works = [partial(_product, *factors) for factors in zip(lefts, rights, strict=True)]
                self._gramian.add(parameter, self.segments.rows, works)

    @override
    def add(self, parameter: nn.Parameter, values: Tensor | Iterable[Tensor]) -> None:
        if self._gramian is None:
            super().add(parameter, values)
        elif parameter in self:
            self._gramian.add(parameter, self.segments.rows, [partial(_part, value) for value in values])

    @override
    def add_from(
        self, parameter: nn.Parameter, works: Iterable[Work], streams: SideStreams, separable: bool = True
    ) -> None:
        if self._gramian is None:  # without streams: what runs side by side needs memory at the same time
            super().add(parameter, (work() for work in works))
        else:
            self._gramian.add(parameter, self.segments.rows, list(works), separable)

    @override
    def add_at(self, parameter: nn.Parameter, entries: Tensor, values: Tensor) -> None:
        if self._gramian is None:
            super().add_at(parameter, entries, values)
        elif parameter in self:
            parts = zip(self.segments.split(entries), self.segments.split(values), strict=True)
            works = [partial(_sums_at, parameter.detach(), *part) for part in parts]
            self._gramian.add(parameter, self.segments.rows, works)

    @override
    def finish(self) -> None:
        if self._gramian is not None:
            self._gramian.finish()


def _part(value: Tensor, part: slice = ALL) -> Tensor:
    return value[part] if value.ndim else value


def _sums_at(like: Tensor, entries: Tensor, values: Tensor, part: slice = ALL) -> Tensor:
    first, last, _ = part.indices(len(like))
    inside = (entries >= first) & (entries < last)
    return torch.zeros_like(like[part]).index_add_(0, entries[inside] - first, values[inside].to(like.dtype))


def _product(left: Tensor, right: Tensor, part: slice = ALL) -> Tensor:
    return left[:, part].T @ right
