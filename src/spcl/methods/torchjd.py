"""Aggregators of TorchJD as methods."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args, get_origin

import numpy as np
import torch
from pydantic import Field, create_model
from torch import Tensor, nn

from spcl._util.validation import check_content
from spcl.errors import CheckpointError, SpclError
from spcl.methods.base import Gradients, Method, Weights
from spcl.methods.registry import TORCHJD
from spcl.methods.settings import MethodSettings

if TYPE_CHECKING:
    from torchjd.aggregation import Aggregator, GramianWeightedAggregator

COUNT = "n_tasks"  # argument for the number of gradients, which the learner knows and the user does not set


class TorchJD(Method):
    """``torchjd:NAME`` is the aggregator ``torchjd.aggregation.NAME``; every gradient is a row of its Jacobian.

    For example ``make_method("torchjd:UPGrad")`` or ``make_method("torchjd:CAGrad", c=0.5)``. Settings are the
    arguments of the aggregator's constructor: plain values, and lists of numbers for vectors. An argument that has the
    name of a setting of every method gets an underscore: FairGrad's ``alpha`` is ``alpha_``. Aggregators that TorchJD
    computes from the Gramian get the learner's, in float64; the others work on the gradients themselves. Some need
    further packages; the error says which, e.g. ``pip install "torchjd[nash_mtl]"``.

    The state of an aggregator (GradVac, PCD, ExcessMTL, NashMTL) is saved with the learner. It is reset when the
    gradients change: when a task begins or ends, or memory is replayed for the first time; for ExcessMTL and NashMTL,
    when the number of gradients changes. A vector (``pref_vector``, ``weights``, ``leak``) fits one number of gradients
    only, and a step with another number is an error.

    >>> method = torchjd_method("AlignedMTL")(scale_mode="median")
    >>> method.name, method
    ('torchjd:AlignedMTL', AlignedMTL(scale_mode='median'))
    >>> torchjd_method("MGDA")(max_iter=3)
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: method 'torchjd:MGDA': there is no setting 'max_iter'; did you mean 'max_iters'?
    """

    family = "TorchJD"
    aggregator: ClassVar["type[Aggregator]"]

    def __init__(self, **settings: Any) -> None:
        self._check_given(settings)
        super().__init__(**settings)
        self._build(1, torch.empty(0))  # raises at once for wrong settings and missing packages
        self._names: list[str] = []
        self._rule: Aggregator | None = None
        self._saved: dict[str, Any] | None = None

    def _check_given(self, settings: Mapping[str, Any]) -> None:
        """Refuse to leave out arguments for which the aggregator has no default."""
        for name, field in self.Settings.model_fields.items():
            if field.is_required() and name not in settings:
                kind = inspect.formatannotation(field.annotation)
                raise SpclError(
                    f"method {self.name!r}: {name} must be given, because {self.reference} has no default for it; "
                    f"set it to a {kind}, as in make_method({self.name!r}, {name}=…)"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the aggregator and the names of the gradients that it belongs to."""
        from torchjd import Stateful

        if not issubclass(self.aggregator, Stateful):
            return {}
        return {"columns": list(self._names), "rule": read_state(self._rule) if self._rule else self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`; the aggregator itself is restored in the next step, from its first input."""
        if state:
            check_content(f"method {self.name!r}", state, {"columns": list[str], "rule": dict | None})
            self._names, self._saved, self._rule = list(state["columns"]), state["rule"], None

    def _rule_for(self, names: list[str], matrix: Tensor) -> "Aggregator":
        if names != self._names:
            self._names, self._saved, self._rule = names, None, None
        if self._rule is None:
            self._rule = self._build(len(names), matrix)
        return self._rule

    def _apply(self, rule: "Aggregator", form: Callable[[Any], Tensor], matrix: Tensor) -> Tensor:
        try:
            if self._saved is not None:
                with torch.random.fork_rng([matrix.device] if matrix.is_cuda else []):
                    form(matrix)  # creates the buffers that the saved state is written to
                try:
                    write_state(rule, self._saved)
                except (LookupError, TypeError, AttributeError, RuntimeError) as error:
                    raise CheckpointError(
                        f"the state of method {self.name!r} does not fit it ({error}); use another checkpoint"
                    ) from error
                self._saved = None
            return form(matrix)
        except ValueError as error:
            raise SpclError(f"method {self.name!r} cannot combine {len(matrix)} gradients: {error}") from error

    def _build(self, gradients: int, like: Tensor) -> "Aggregator":
        chosen = {name: getattr(self.settings, setting) for name, setting in _settings_of(self.aggregator).items()}
        arguments = {name: like.new_tensor(v) if isinstance(v, list) else v for name, v in chosen.items()}
        if COUNT in inspect.signature(self.aggregator).parameters:
            arguments[COUNT] = gradients
        try:
            return self.aggregator(**arguments)
        except (ImportError, ValueError) as error:
            raise SpclError(f"method {self.name!r}: {error}") from None


class _GramianTorchJD(TorchJD):
    """An aggregator that TorchJD computes from the Gramian."""

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the aggregator's weights."""
        gramian = gradients.known_gramian()
        rule = cast("GramianWeightedAggregator", self._rule_for(list(gradients.names), gramian))
        return Weights(self._apply(rule, rule.gramian_weighting, gramian))


class _ElementwiseTorchJD(TorchJD):
    """An aggregator that needs the gradients themselves."""

    def combine(self, gradients: Tensor) -> Tensor:
        """Return the aggregation of the gradients."""
        if len(gradients) == 1 and COUNT in inspect.signature(self.aggregator).parameters:
            return gradients[0]  # TorchJD's NashMTL, a bargain between tasks, fails for a single one
        rule = self._rule_for([str(row) for row in range(len(gradients))], gradients)
        return self._apply(rule, rule, gradients)


def aggregators() -> "dict[str, type[Aggregator]]":
    """Return TorchJD's aggregators by name.

    >>> sorted(aggregators())[:3]
    ['AlignedMTL', 'CAGrad', 'ConFIG']
    """
    import torchjd.aggregation
    from torchjd.aggregation import Aggregator, GramianWeightedAggregator, WeightedAggregator

    found = {name: getattr(torchjd.aggregation, name) for name in torchjd.aggregation.__all__}
    bases = (Aggregator, WeightedAggregator, GramianWeightedAggregator)
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, Aggregator) and kind not in bases
    }


@cache
def torchjd_method(name: str) -> type[TorchJD]:
    """Return the method for this aggregator of TorchJD."""
    from torchjd.aggregation import GramianWeightedAggregator

    aggregator = aggregators()[name]
    fields: dict[str, Any] = {}
    parameters = inspect.signature(aggregator, eval_str=True).parameters
    for argument, setting in _settings_of(aggregator).items():
        default = ... if parameters[argument].default is inspect.Parameter.empty else parameters[argument].default
        fields[setting] = _plain(parameters[argument].annotation), Field(default, description=f"TorchJD's {argument}")
    has_gramian_form = issubclass(aggregator, GramianWeightedAggregator)
    return type(
        name,
        (_GramianTorchJD if has_gramian_form else _ElementwiseTorchJD,),
        {
            "__doc__": f"TorchJD's {name}.",
            "name": TORCHJD + name,
            "summary": f"TorchJD's {name}",
            "reference": f"torchjd.aggregation.{name}",
            "aggregator": aggregator,
            "Settings": create_model(f"{name}Settings", __base__=MethodSettings, **fields),
        },
    )


def _settings_of(aggregator: "type[Aggregator]") -> dict[str, str]:
    """Return the arguments that are plain values or vectors, each with the name of its setting."""
    parameters = inspect.signature(aggregator, eval_str=True).parameters
    names = [name for name, given in parameters.items() if name != COUNT and _plain(given.annotation) is not None]
    return {name: f"{name}_" if name in MethodSettings.model_fields else name for name in names}


def _plain(annotation: Any) -> Any:
    """Return the type of the setting for an argument of this type, a list for a vector; None if it has no setting."""
    if annotation in (bool, int, float, str, NoneType) or get_origin(annotation) is Literal:
        return annotation
    if annotation is Tensor:
        return list[float]
    if get_origin(annotation) is UnionType:
        parts = [_plain(part) for part in get_args(annotation)]
        return None if None in parts else reduce(or_, parts)
    return None


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def read_state(module: nn.Module) -> dict[str, Any]:
    """Return copies of all buffers, numbers and arrays among the attributes of the module and its submodules.

    TorchJD's aggregators have buffers that are None at first, and counters that are plain attributes: ``state_dict()``
    does not contain them and ``load_state_dict()`` does not accept them.

    >>> layer = nn.BatchNorm1d(2, affine=False)
    >>> state = read_state(layer)
    >>> state["running_mean"], state["momentum"]
    (tensor([0., 0.]), 0.1)
    >>> _ = layer(torch.randn(8, 2))
    >>> write_state(layer, state)
    >>> layer.running_mean
    tensor([0., 0.])
    """
    return {path: value for path, _, _, value in _entries(module)}


def write_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Restore the state from :func:`read_state` in a module with the same attributes."""
    for path, owner, name, present in list(_entries(module)):
        value = state[path]
        if isinstance(present, int | float) and not isinstance(value, int if isinstance(present, int) else int | float):
            raise TypeError(f"{path} is {value!r:.40}")
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            value = value.to(present.device, copy=True)
        if isinstance(getattr(owner, name), np.ndarray):
            value = value.cpu().numpy().copy()
        setattr(owner, name, value)


def _entries(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield path, owner, name and a plain copy of every buffer, number and array."""
    for prefix, part in module.named_modules():
        attributes = {name: value for name, value in vars(part).items() if name not in MODULE_ATTRIBUTES}
        for name, value in [*part._buffers.items(), *attributes.items()]:
            if value is None or isinstance(value, (bool, int, float, Tensor)):
                copy = value.clone() if isinstance(value, Tensor) else value
            elif isinstance(value, np.ndarray):
                copy = torch.from_numpy(value.copy())
            else:
                continue
            yield f"{prefix}.{name}" if prefix else name, part, name, copy
