"""Every aggregator of TorchJD as a method."""

import inspect
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, cast, get_args, get_origin

import torch
import torchjd.aggregation
from pydantic import Field, create_model
from torch import Tensor
from torchjd import Stateful
from torchjd.aggregation import Aggregator, GramianWeightedAggregator, WeightedAggregator

from spcl.errors import SpclError
from spcl.methods.base import Gradients, Method, MethodSettings, Weights
from spcl.methods.module_state import read_state, write_state

__all__ = ["PREFIX", "TorchJD", "aggregators", "torchjd_method"]

PREFIX = "torchjd:"
COUNT = "n_tasks"  # an argument that is the number of columns, and so not for the user to set


class TorchJD(Method):
    """An aggregator of TorchJD; every column, memory among them, is a row of its Jacobian.

    Its settings are the arguments of the aggregator's constructor that are plain values; a vector is given as a list of
    numbers. An argument whose name every method has already gets an underscore (``alpha_`` of FairGrad). Where TorchJD
    has the rule in terms of the Gramian that is used, else the gradients themselves. What a rule remembers between
    steps starts anew when the columns change (for a rule without Gramian: their number), since it is about those
    columns. Random rules draw from PyTorch's global generator, whose state checkpoints hold.

    >>> method = torchjd_method("AlignedMTL")(scale_mode="median")
    >>> method.name, method
    ('torchjd:AlignedMTL', AlignedMTL(scale_mode='median'))
    >>> torchjd_method("MGDA")(max_iter=3)
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: method 'torchjd:MGDA': there is no setting 'max_iter'; did you mean 'max_iters'?
    """

    family = "TorchJD"
    aggregator: ClassVar[type[Aggregator]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._build(1, torch.empty(0))  # refuses wrong settings and missing packages at once
        self._columns: list[str] = []
        self._rule: Aggregator | None = None
        self._saved: dict[str, Any] | None = None

    def weigh(self, gradients: Gradients) -> Weights:
        """The weights, from the Gramian."""
        gramian = gradients.known_gramian()
        rule = cast(GramianWeightedAggregator, self._rule_for(list(gradients.names), gramian))
        return Weights(self._apply(rule, rule.gramian_weighting, gramian))

    def combine(self, rows: Tensor) -> Tensor:
        """The update, from the gradients themselves."""
        if len(rows) == 1 and COUNT in inspect.signature(self.aggregator).parameters:
            return rows[0]  # TorchJD's NashMTL, a bargain between tasks, cannot do with one
        rule = self._rule_for([str(row) for row in range(len(rows))], rows)
        return self._apply(rule, rule, rows)

    def state_dict(self) -> dict[str, Any]:
        """What the rule remembers, and of which columns."""
        if not issubclass(self.aggregator, Stateful):
            return {}
        return {"columns": list(self._columns), "rule": read_state(self._rule) if self._rule else self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; the rule gets it at the next step, when it has seen what its input is like."""
        if state:
            self._columns, self._saved, self._rule = list(state["columns"]), state["rule"], None

    def _rule_for(self, columns: list[str], matrix: Tensor) -> Aggregator:
        if columns != self._columns:
            self._columns, self._saved, self._rule = columns, None, None
        if self._rule is None:
            self._rule = self._build(len(columns), matrix)
        return self._rule

    def _apply(self, rule: Aggregator, form: Callable[[Any], Tensor], matrix: Tensor) -> Tensor:
        try:
            if self._saved is not None:
                with torch.random.fork_rng([matrix.device] if matrix.is_cuda else []):
                    form(matrix)  # lets the rule make room for what is put there next
                write_state(rule, self._saved)
                self._saved = None
            return form(matrix)
        except ValueError as error:
            raise SpclError(f"method {self.name!r} cannot combine {len(matrix)} columns: {error}") from error

    def _build(self, columns: int, like: Tensor) -> Aggregator:
        chosen = {name: getattr(self.settings, setting) for name, setting in _settings_of(self.aggregator).items()}
        arguments = {name: like.new_tensor(v) if isinstance(v, list) else v for name, v in chosen.items()}
        if COUNT in inspect.signature(self.aggregator).parameters:
            arguments[COUNT] = columns
        try:
            return self.aggregator(**arguments)
        except (ImportError, ValueError) as error:
            raise SpclError(f"method {self.name!r}: {error}") from None


def aggregators() -> dict[str, type[Aggregator]]:
    """TorchJD's aggregators by name.

    >>> sorted(aggregators())[:3]
    ['AlignedMTL', 'CAGrad', 'ConFIG']
    """
    found = {name: getattr(torchjd.aggregation, name) for name in torchjd.aggregation.__all__}
    bases = (Aggregator, WeightedAggregator, GramianWeightedAggregator)
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, Aggregator) and kind not in bases
    }


@cache
def torchjd_method(name: str) -> type[TorchJD]:
    """The method that is this aggregator of TorchJD."""
    aggregator = aggregators()[name]
    fields: dict[str, Any] = {}
    parameters = inspect.signature(aggregator, eval_str=True).parameters
    for argument, setting in _settings_of(aggregator).items():
        default = ... if parameters[argument].default is inspect.Parameter.empty else parameters[argument].default
        fields[setting] = _plain(parameters[argument].annotation), Field(default, description=f"TorchJD's {argument}")
    return type(
        name,
        (TorchJD,),
        {
            "__doc__": f"TorchJD's {name}.",
            "name": PREFIX + name,
            "summary": f"TorchJD's {name}",
            "reference": f"torchjd.aggregation.{name}",
            "elementwise": not issubclass(aggregator, GramianWeightedAggregator),
            "aggregator": aggregator,
            "Settings": create_model(f"{name}Settings", __base__=MethodSettings, **fields),
        },
    )


def _settings_of(aggregator: type[Aggregator]) -> dict[str, str]:
    """The arguments that are plain values, and the settings they come from."""
    parameters = inspect.signature(aggregator, eval_str=True).parameters
    names = [name for name, given in parameters.items() if name != COUNT and _plain(given.annotation) is not None]
    return {name: f"{name}_" if name in MethodSettings.model_fields else name for name in names}


def _plain(annotation: Any) -> Any:
    """The type of a setting for an argument of this type, with a list for a vector; None if there is none."""
    if annotation in (bool, int, float, str, NoneType) or get_origin(annotation) is Literal:
        return annotation
    if annotation is Tensor:
        return list[float]
    if get_origin(annotation) is UnionType:
        parts = [_plain(part) for part in get_args(annotation)]
        return None if None in parts else reduce(or_, parts)
    return None
