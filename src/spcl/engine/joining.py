"""Decides which batches of a step can share one pass through the network, as a joint batch."""

from collections.abc import Callable, Hashable, Sequence
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from spcl.batches import Inputs, concatenate, map_leaves, number_of_samples, sample_kind
from spcl.engine.model import BufferSnapshot, Samples, SharedModel
from spcl.engine.rows import GradientMatrix, ReductionPlan
from spcl.engine.segmented import SegmentedMode
from spcl.engine.segments import SegmentGradients, Segments, UnsupportedError

Joining = Literal["segments", "rows"]
"""Which batches can share one pass: ``"segments"``, all, each with its gradient; ``"rows"``, those that share a row."""


class Decision(NamedTuple):
    """Which batches can share one pass; None if none can. The reason is None if all can."""

    joining: Joining | None
    reason: str | None


UNDECIDED = Decision(None, "the features or gradients of these samples are not finite")
"""The result of a trial that must be repeated with other samples."""


MOST_IMAGES = 8
"""The mean size of a batch up to which a joint batch makes convolutions on a CPU faster (benchmarks/sources.py)."""


class JoiningRule:
    """Decides from the layers of the network, or by a :class:`Trial` on samples, which batches can share one pass.

    The decision does not depend on what happened in training, so a resumed run makes the same passes.

    Args:
        model: the shared model.
        parameters: the trained parameters of its backbone.
        snapshot: the copies of its buffers.
        for_speed: whether batches are kept apart if they are faster in separate passes.

    Attributes:
        names: the names of the trained parameters of the backbone.
        counters: the ``num_batches_tracked`` of its batch-norm layers.
        is_known: whether all layers of the backbone are known, so no trial is needed.
    """

    def __init__(
        self,
        model: SharedModel,
        parameters: Sequence[nn.Parameter],
        snapshot: BufferSnapshot,
        for_speed: bool = True,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._snapshot = snapshot
        self.names = {each: name for name, each in model.backbone.named_parameters() if each.requires_grad}
        self._norms = [layer for layer in model.backbone.modules() if isinstance(layer, _NormBase)]
        counters = (layer.num_batches_tracked for layer in self._norms)
        self.counters: list[Tensor] = [counter for counter in counters if counter is not None]
        self._network_obstacle = _network_obstacle(model)
        self.is_known = consists_of_known_layers(model.backbone)
        self._encoders: list[nn.Module] = []
        self._encoder_rules: dict[nn.Module, EncoderLayers] = {}
        self._encoded_kinds: dict[Hashable, Hashable] = {}
        has_images = any(isinstance(layer, nn.Conv2d | nn.Conv3d) for layer in model.backbone.modules())
        is_limited = for_speed and has_images and model.device.type == "cpu"
        self._most_samples = MOST_IMAGES if is_limited else None
        self._tried: dict[Hashable, Decision] = {}

    def refuse(self, reason: str) -> None:
        """Let batches share no pass from now on."""
        self._network_obstacle = reason

    @property
    def has_batch_norm(self) -> bool:
        """Whether any layer normalises by the statistics of a batch."""
        return any(layer.training for layer in self._norms)

    def decide(self, groups: Sequence[Sequence[Samples]]) -> Decision:
        """Decide which batches can share one pass, given the samples of each."""
        obstacle = self._network_obstacle or self._present_obstacle() or self._size_obstacle(groups)
        if obstacle is not None:
            return Decision(None, obstacle)
        decisions = [] if not self._model.encoders else self._decisions_on_encoders(groups)
        if not self.is_known:
            kinds: dict[Hashable, list[Samples]] = {}
            for samples in groups:
                for kind, group in {self._encoded_kind(group): group for group in samples}.items():
                    kinds.setdefault(kind, []).append(group)
            decisions += [self._decision(kind, members) for kind, members in kinds.items()]
        reason = next((each.reason for each in decisions if each.reason is not None), None)
        joinings = {each.joining for each in decisions}
        return Decision(None if None in joinings else "rows" if "rows" in joinings else "segments", reason)

    def mode(
        self, segments: Segments, target: SegmentGradients | None, encoder: nn.Module | None = None
    ) -> SegmentedMode:
        """Return the mode in which the backbone, or an encoder, computes a joint batch."""
        if encoder is None:
            return SegmentedMode(segments, target, self.names, self.counters, defers=self.is_known)
        layers = self._layers_of(encoder)
        return SegmentedMode(segments, target, layers.shared, layers.counters, others=layers.own)

    def is_shared(self, encoder: nn.Module) -> bool:
        """Return whether several sources can reach some trained parameters of an encoder."""
        return bool(self._layers_of(encoder).shared)

    def segmented_names(self) -> dict[nn.Parameter, str]:
        """Return the names of the parameters whose gradients are computed by segments."""
        names = dict(self.names)
        for encoder in self._model.encoders:
            names |= self._layers_of(encoder).shared
        return names

    def _layers_of(self, encoder: nn.Module) -> "EncoderLayers":
        """Return what is known of an encoder, as long as sources have the same encoders."""
        if self._encoders is not self._model.encoders:
            self._encoders = self._model.encoders
            self._encoder_rules.clear()
        if encoder not in self._encoder_rules:
            self._encoder_rules[encoder] = EncoderLayers(encoder, self._model.shared_encoder_parameters)
        return self._encoder_rules[encoder]

    def _decisions_on_encoders(self, groups: Sequence[Sequence[Samples]]) -> list[Decision]:
        """Return which batches may share a pass through each encoder."""
        passes: dict[tuple[nn.Module, Hashable], list[Inputs]] = {}
        for samples in groups:
            for group in samples:
                if group.source.encoder is not None:
                    passes.setdefault((group.source.encoder, sample_kind(group.x)), []).append(group.x)
        decisions = []
        for (encoder, kind), inputs in passes.items():
            layers = self._layers_of(encoder)
            if layers.obstacle is not None:
                decisions.append(Decision(None, layers.obstacle))
            elif not layers.is_known and len(inputs) > 1:
                decisions.append(self._tried_decision((encoder, kind), encoder, inputs, layers))
        return decisions

    def _encoded_kind(self, group: Samples) -> Hashable:
        """Return the kind of samples as they enter the backbone."""
        kind = sample_kind(group.x)
        if group.source.encoder is None:
            return kind
        key = group.source.encoder, kind
        if key not in self._encoded_kinds:
            self._encoded_kinds[key] = sample_kind(self._encoded(group))
        return self._encoded_kinds[key]

    def _encoded(self, group: Samples) -> Inputs:
        """Return the inputs of samples as they enter the backbone, without a trace in any state."""
        if group.source.encoder is None:
            return self._model.on_device(group.x)
        with torch.no_grad(), self._model.evaluating():
            (inputs,) = self._model.encoded([group], [group.x])
        return inputs

    def _present_obstacle(self) -> str | None:
        if any(layer.training and layer.momentum is None for layer in self._norms):
            return "batch-norm with momentum=None averages over all batches"
        if self._model.has_joint_logits and any(_has_batch_norm(task.head) for task in self._model.classifiers):
            return "heads with batch-norm get the samples of all tasks"
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self.names):
            return "parameters of the backbone have hooks"
        return None

    def _size_obstacle(self, groups: Sequence[Sequence[Samples]]) -> str | None:
        """Return why these batches are faster in separate passes: many images fill the processor's caches anyway."""
        if self._most_samples is None:
            return None
        samples = sum([group.y.shape[0] for batch in groups for group in batch])
        if samples > self._most_samples * len(groups):
            return f"convolutions are faster in separate passes for batches of more than {self._most_samples} images"
        return None

    def _decision(self, kind: Hashable, members: Sequence[Samples]) -> Decision:
        """Return which batches of one kind may share a pass through the backbone."""
        if kind in self._tried:
            return self._tried[kind]
        try:
            inputs = [self._encoded(group) for group in members[:2]]
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            return Decision(None, f"a pass over one batch raises {type(error).__name__}: {error}")
        layers = BackboneLayers(self._parameters, self.names, self.counters)
        return self._tried_decision(kind, self._model.backbone, inputs, layers)

    def _tried_decision(
        self, key: Hashable, network: nn.Module, inputs: Sequence[Inputs], layers: "BackboneLayers | EncoderLayers"
    ) -> Decision:
        """Return the decision on a network by a trial, which is repeated until it says something."""
        if key not in self._tried:
            trial = Trial(network, layers.parameters, layers.names, layers.counters, self._snapshot)
            try:
                result = trial.run([self._model.on_device(x) for x in inputs[:2]])
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
                return Decision(None, f"a pass over one batch raises {type(error).__name__}: {error}")
            if result is UNDECIDED:
                return result
            self._tried[key] = result
        return self._tried[key]


class BackboneLayers(NamedTuple):
    """The trained parameters of a backbone, their names, and the counters of its batch-norm layers."""

    parameters: Sequence[nn.Parameter]
    names: dict[nn.Parameter, str]
    counters: Sequence[Tensor]


class EncoderLayers:
    """What a joint pass must know of an encoder.

    Attributes:
        parameters: its trained parameters.
        names: their names.
        shared: the names of those that several sources can reach, whose gradients are computed by segments.
        own: those that a single source can reach, whose gradients are left to autograd.
        counters: the ``num_batches_tracked`` of its batch-norm layers.
        is_known: whether it consists of known layers, so no trial is needed.
        obstacle: why it cannot compute several batches in one pass; None if it may.
    """

    def __init__(self, encoder: nn.Module, shared: Sequence[nn.Parameter]) -> None:
        self.names = {each: name for name, each in encoder.named_parameters() if each.requires_grad}
        self.parameters = list(self.names)
        known = set(shared)
        self.shared = {each: name for each, name in self.names.items() if each in known}
        self.own = [each for each in self.parameters if each not in known]
        norms = [layer for layer in encoder.modules() if isinstance(layer, _NormBase)]
        counters = (layer.num_batches_tracked for layer in norms)
        self.counters: list[Tensor] = [counter for counter in counters if counter is not None]
        self.is_known = consists_of_known_layers(encoder)
        self.obstacle: str | None = None
        if any(layer.momentum is None for layer in norms):
            self.obstacle = "batch-norm with momentum=None in an encoder averages over all batches"
        elif any(each._backward_hooks or each._post_accumulate_grad_hooks for each in self.parameters):
            self.obstacle = "parameters of an encoder have hooks"


def _network_obstacle(model: SharedModel) -> str | None:
    """Return why batches of this model cannot share a pass, whatever the samples are."""
    modules = list(model.backbone.modules())
    if model.autocast is not None and model.device.type != "cuda":
        return "passes are in mixed precision"
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return "the backbone is compiled"
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        return "the backbone is a TorchScript module"
    return None


def _has_batch_norm(head: nn.Module | None) -> bool:
    if head is None or type(head) is nn.Linear:  # most heads; the search below would be repeated in every step
        return False
    return any(isinstance(layer, _NormBase) for layer in head.modules())


# -- trial

SAMPLES, ATTEMPTS = 4, 4
DROPOUTS = {
    getattr(functional, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}


class WithoutDropout(TorchFunctionMode):
    """Turns dropout off within the block, so that passes over the same samples can be compared.

    >>> with WithoutDropout():
    ...     nn.Dropout(0.5)(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function without dropout."""
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args, kwargs = [*args[:4], *(0.0 for _ in args[4:5]), *args[5:]], {**(kwargs or {})}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        if func is functional.multi_head_attention_forward and len(args) > 10:
            args = [*args[:10], 0.0, *args[11:]]
        return func(*args, **(kwargs or {}))


class Trial:
    """Compares one pass over a few samples of two batches with separate passes, from the same buffers.

    Features, gradients and buffers must agree up to rounding. They do not if the network mixes the samples of a batch,
    draws random numbers other than dropout's, or uses parameters in a way that segments cannot follow.
    """

    def __init__(
        self,
        backbone: nn.Module,
        parameters: Sequence[nn.Parameter],
        names: dict[nn.Parameter, str],
        counters: Sequence[Tensor],
        snapshot: BufferSnapshot,
    ) -> None:
        self._backbone = backbone
        self._parameters = parameters
        self._names = names
        self._counters = counters
        self._snapshot = snapshot

    def run(self, batches: Sequence[Inputs]) -> Decision:
        """Return which batches can share one pass, or :data:`UNDECIDED`.

        An error that a pass over a single batch raises is passed on.
        """
        for attempt in range(ATTEMPTS):
            first = attempt * SAMPLES
            parts = [map_leaves(lambda leaf: leaf[first : first + SAMPLES], x) for x in batches]  # noqa: B023
            if attempt and any(number_of_samples(x) < 2 for x in parts):
                break
            result = self._attempt(parts)
            if result.joining == "segments":
                return result
        return result

    def _attempt(self, parts: Sequence[Inputs]) -> Decision:
        generators = {parameter.device for parameter in self._parameters if parameter.is_cuda}
        exact = torch.backends.cudnn.flags(enabled=False)  # cuDNN rounds more, and is slow to start with new sizes
        with torch.random.fork_rng(devices=generators), WithoutDropout(), torch.enable_grad(), exact:
            expected = self._separate(parts)
            if not all(map(isfinite, _norms(expected))):
                return UNDECIDED
            reason = self._difference(self._segmented, parts, expected)
            if reason is None:
                return Decision("segments", None)
            expected = _with_summed_gradients(expected, len(parts), len(self._parameters))
            other = self._difference(self._added, parts, expected)
            return Decision("rows", reason) if other is None else Decision(None, other)

    def _difference(
        self, compute: Callable[[Sequence[Inputs]], list[Tensor]], parts: Sequence[Inputs], expected: Sequence[Tensor]
    ) -> str | None:
        try:
            found = compute(parts)
        except UnsupportedError as error:
            return str(error)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
            return f"a pass over several batches raised {type(error).__name__}: {error}"
        finally:
            self._snapshot.restore()
            for parameter in self._parameters:
                parameter.grad = None
        if _are_close(found, expected):
            return None
        return "the features or gradients of a sample depend on the other samples of the pass, or on random numbers"

    def _separate(self, parts: Sequence[Inputs]) -> list[Tensor]:
        """Return features, buffers and gradients of one pass per batch."""
        try:
            features = [self._backbone(x) for x in parts]
            gradients = [
                gradient
                for each, by in zip(features, _cotangents(features), strict=True)
                for gradient in self._gradients(each, by)
            ]
            return [torch.cat([each.detach() for each in features]), *self._buffers(), *gradients]
        finally:
            self._snapshot.restore()

    def _segmented(self, parts: Sequence[Inputs]) -> list[Tensor]:
        """Return features, buffers and gradients of one pass, with gradients by segment."""
        sizes = tuple(number_of_samples(x) for x in parts)
        segments = Segments(sizes, tuple(range(len(sizes))))
        matrix = GradientMatrix(self._parameters, like=torch.empty(0))
        matrix.begin(ReductionPlan.make([str(row) for row in segments.rows], "none", separate=True))
        target = SegmentGradients(matrix, segments, fresh=True)
        mode = SegmentedMode(segments, target, self._names, self._counters)
        features = mode.run(self._backbone, concatenate(parts))
        if features.requires_grad:
            torch.autograd.backward(features, torch.cat(_cotangents(torch.split_with_sizes(features, sizes))))
        target.finish()
        check_unused(self._names)
        gradients = [view for row in matrix.rows for view in matrix.views(row)]
        return [features.detach(), *self._buffers(), *gradients]

    def _added(self, parts: Sequence[Inputs]) -> list[Tensor]:
        """Return features, buffers and the sum of the gradients of one pass."""
        sizes = tuple(number_of_samples(x) for x in parts)
        mode = SegmentedMode(Segments(sizes, (0,) * len(sizes)), None, self._names, self._counters)
        features = mode.run(self._backbone, concatenate(parts))
        gradients = self._gradients(features, torch.cat(_cotangents(torch.split_with_sizes(features, sizes))))
        return [features.detach(), *self._buffers(), *gradients]

    def _gradients(self, features: Tensor, by: Tensor) -> list[Tensor]:
        if not (self._parameters and features.requires_grad):
            return [torch.zeros_like(parameter) for parameter in self._parameters]
        return list(torch.autograd.grad(features, self._parameters, by, allow_unused=True, materialize_grads=True))

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self._backbone.buffers()]


def check_unused(names: dict[nn.Parameter, str]) -> None:
    """Raise if autograd has computed the gradient of a parameter: then it is used where segments cannot follow."""
    for parameter, name in names.items():
        if parameter.grad is not None:
            raise UnsupportedError(f"the parameter {name!r} is used where segments cannot follow")


def _cotangents(features: Sequence[Tensor]) -> list[Tensor]:
    """Return fixed gradients of the features, different for every sample."""
    return [
        torch.arange(1, each.numel() + 1, dtype=each.dtype, device=each.device).cos().view_as(each) / (1 + index)
        for index, each in enumerate(features)
    ]


def _with_summed_gradients(tensors: list[Tensor], batches: int, parameters: int) -> list[Tensor]:
    others = tensors[: len(tensors) - batches * parameters]
    gradients = [tensors[len(others) + start :: parameters] for start in range(parameters)]
    return [*others, *(torch.stack(some[:batches]).sum(dim=0) for some in gradients)]


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether every difference is small relative to its tensor, or very small relative to the largest tensor."""
    tolerances = [
        max(1e-3, torch.finfo(each.dtype).eps ** 0.5 if each.is_floating_point() else 0.0) for each in expected
    ]
    differences = [one.double() - other.double() for one, other in zip(found, expected, strict=True)]
    errors, sizes = _norms(differences), _norms(expected)
    largest = max(sizes, default=0.0)
    triples = zip(errors, sizes, tolerances, strict=True)
    return all(error <= tolerance * (size + 0.01 * largest) for error, size, tolerance in triples)


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the norms of tensors, with one synchronisation with the device."""
    if not tensors:
        return []
    norms: list[float] = torch.stack(torch._foreach_norm([tensor.double() for tensor in tensors])).tolist()
    return norms


# -- known layers

OWN = ("spcl.models.", "spcl.encoders")
CONTAINERS = {nn.Sequential, nn.ModuleList, nn.Identity}
LAYERS = {nn.Linear, nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d}
LAYERS |= {nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d}
NORMALISATIONS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm}
ACTIVATIONS = {nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Dropout2d}
KNOWN = CONTAINERS | LAYERS | NORMALISATIONS | ACTIVATIONS


def consists_of_known_layers(network: nn.Module) -> bool:
    """Return whether a network has only layers that treat every sample, or in batch-norm every batch, by itself.

    Hooks and replaced methods make a layer unknown.

    >>> consists_of_known_layers(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    True
    >>> consists_of_known_layers(nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=0)))
    False
    >>> consists_of_known_layers(nn.Sequential(norm := nn.BatchNorm1d(3), nn.ReLU(), norm))
    False
    """
    uses = [module for _, module in network.named_modules(remove_duplicate=False)]
    is_simple = len(uses) == len(set(uses))  # a batch-norm layer used twice would see the batches in another order
    return is_simple and all(_is_known(module) and not _is_changed(module) for module in uses)


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1
    if isinstance(module, nn.Embedding):
        return not (module.max_norm or module.scale_grad_by_freq or module.sparse)
    return type(module) in KNOWN or type(module).__module__.startswith(OWN)


def _is_changed(module: nn.Module) -> bool:
    """Return whether a module has hooks, a replaced method, or a padding that segments cannot follow."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module) or isinstance(getattr(module, "padding", 0), str)
