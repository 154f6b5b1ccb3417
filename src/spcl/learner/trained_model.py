"""A shared model in training: its optimiser, its engine, and which of its parameters are trained."""

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from spcl.batches import BatchLike
from spcl.cuda_graphs import CudaGraphEngine
from spcl.distributed import DistributedEngine, ShardedEngine, World
from spcl.distributed.sharded import ShardedAverage, check_sharded, is_sharded, refuse_sharded
from spcl.engine.averaging import WeightAverage
from spcl.engine.base import Engine
from spcl.engine.eager import EagerEngine
from spcl.engine.low_memory import LowMemoryEngine
from spcl.engine.model import Samples, SharedModel
from spcl.learner.admission import Admission
from spcl.learner.distribution import RankCheck
from spcl.learner.freezing import frozen_normalisations, matching, trainable
from spcl.learner.low_memory import LowMemory, LowMemoryChoice
from spcl.learner.modules import uncompiled
from spcl.learner.optimizer import MakeOptimizer, add_head, keep_trainable, make_optimizer
from spcl.learner.prediction import Predictor
from spcl.learner.predictors import PredictionHeads
from spcl.learner.state import Parts
from spcl.learner.step_runner import StepRunner
from spcl.memory import Memory
from spcl.methods.base import Method
from spcl.registry import Named

__all__ = ["TrainedModel"]

UNCAPTURED_RANKS = "ranks that train together capture no CUDA graphs, so their kernels are launched singly"


class TrainedModel(Predictor):
    """A shared model, of whose backbone parts may be frozen and unfrozen.

    Args:
        model: the shared model.
        method: how the tasks' gradients become one update.
        memory: of earlier samples, or None.
        optimizer: makes the optimiser from a list of parameters; by default Adam.
        average: decay of the average of the weights, or None.
        predict_by: what predicts classes, one of ``spcl.learner.predictors.PREDICTORS``.
        capture: whether CUDA graphs are captured on a GPU.
        low_memory: whether gradients are not held; ``"auto"``: where they would not fit.
        distributed: the ranks that train the model together, or None.
    """

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        memory: Memory | None,
        *,
        optimizer: MakeOptimizer | None,
        average: float | None,
        predict_by: Named,
        capture: bool,
        low_memory: LowMemory,
        distributed: World | None,
    ) -> None:
        check_sharded(model.backbone, method, distributed)
        self._is_sharded = is_sharded(model.backbone)
        mean = ShardedAverage if self._is_sharded else WeightAverage
        super().__init__(model, None if average is None else mean(average), PredictionHeads(predict_by, memory))
        self.method = method
        self.memory = memory
        self.average = average
        self.predict_by = predict_by
        self.capture = capture
        self._low_memory = LowMemoryChoice(low_memory)
        self.distributed = distributed
        self._ranks = None if distributed is None else RankCheck(distributed, low_memory)
        self._has_refrozen = False
        self._use_engine(self._make_engine())
        if distributed is not None and distributed.is_first and self.fallback_reason is not None:
            warnings.warn(self.fallback_reason, RuntimeWarning, stacklevel=3)
        shared = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.optimizer = make_optimizer(optimizer or torch.optim.Adam, shared, like)
        self._average_all()

    def freeze(self, *patterns: str) -> None:
        """Stop training the backbone's parameters whose names match any of these patterns; without patterns all.

        The optimiser and the average of the weights forget them. Batch-norm layers whose own parameters are then all
        frozen run in evaluation mode. Heads are trained on.

        Args:
            patterns: of names as in ``backbone.named_parameters()``, with the wildcards ``*``, ``?`` and ``[…]``.
        """
        frozen = matching(self.model.backbone, patterns)
        self._train({each for each in self.model.backbone.parameters() if each.requires_grad} - frozen)

    def unfreeze(self, *patterns: str) -> None:
        """Train the backbone's parameters whose names match any of these patterns again; without patterns all.

        Those that no group of the optimiser holds join its first one.
        """
        trained = {each for each in self.model.backbone.parameters() if each.requires_grad}
        self._train(trained | matching(self.model.backbone, patterns))

    def _train(self, chosen: set[nn.Parameter]) -> None:
        """Train these parameters of the backbone, and no others, from now on."""
        backbone = self.model.backbone
        refuse_sharded(backbone, "frozen or unfrozen")
        frozen_layers = frozen_normalisations(backbone)
        with trainable(backbone, chosen):
            engine = self._make_engine()
        for parameter in backbone.parameters():
            parameter.grad = None
        for layer in frozen_layers:
            layer.train(backbone.training)
        self._use_engine(engine)
        keep_trainable(self.optimizer, backbone.parameters())
        self._average_all()
        self._has_refrozen = True

    @property
    def low_memory(self) -> LowMemory:
        """Whether gradients are not held, or ``"auto"`` if that is decided by whether they fit."""
        return self._low_memory.setting

    @property
    def fallback_reason(self) -> str | None:
        """Why the latest step took a slower way than others take; None if it did not, or there is no faster one.

        Either its batches did not all share one pass, on a CPU or in CUDA graphs, or no CUDA graphs are captured though
        ``capture`` asks for them. Results are the same up to rounding.

        >>> from spcl.learner import Learner
        >>> from spcl.methods import SORO
        >>> learner = Learner(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None)), SORO())
        >>> for task in ("camera", "radar"):
        ...     learner.add_task(task, classes=2)
        >>> batches = {task: (torch.randn(6, 4), torch.arange(6) % 2) for task in learner.tasks}
        >>> report = learner.step(batches)
        >>> learner.fallback_reason
        'batch-norm with momentum=None averages over all batches'
        """
        return self._engine.fallback_reason

    def _choose_engine(self, tasks: int, measured: bool) -> None:
        """Change to the engine that holds no gradients before a step of so many tasks, if its gradients do not fit."""
        if self._ranks is not None:
            self._ranks.check(self.model, self.method)
            return
        separate = measured or self.method.reduction == "none"
        rows = tasks + (self.memory is not None) + (self.method.settings.alpha > 0.0) if separate else 0
        if self._low_memory.choose(rows, self.method, self._engine.gradients):
            self._use_low_memory()

    def _use_low_memory(self) -> None:
        self._low_memory.is_chosen = True
        for parameter in self._engine.gradients.parameters:
            parameter.grad = None  # a view of the gradient matrix
        self._use_engine(self._make_engine())

    def _make_engine(self) -> Engine:
        graphs = self.capture and self.model.device.type == "cuda"
        if self.distributed is not None:
            kind = ShardedEngine if self._is_sharded else DistributedEngine
            ranks = kind(self.model, self.method, self.distributed)
            ranks.fallback_reason = UNCAPTURED_RANKS if graphs else None
            return ranks
        if self._low_memory.is_chosen:
            return LowMemoryEngine(self.model, self.method)
        return (CudaGraphEngine if graphs else EagerEngine)(self.model, self.method)

    def _use_engine(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = StepRunner(engine, self.model, self.method, self.memory)
        self._admission = Admission(self.model, self.method, self.memory, self._ranks)

    def _admitted(self, batches: Mapping[str, BatchLike]) -> list[Samples]:
        """Return the batches of a step once they are checked, and make the heads of tasks that are new."""
        samples = self._admission.check(batches)
        feature_dim = self._admission.try_first_samples([group for group in samples if group.task.signature is None])
        if feature_dim is not None:
            self._build_heads(feature_dim)
        return samples

    def _build_heads(self, feature_dim: int) -> None:
        """Make the heads that are missing, and train them."""
        if made := self.model.build_heads(feature_dim):
            for task in made:
                add_head(self.optimizer, task)
            self._average_all()

    def _parts(self) -> Parts:
        return Parts(self.model, self.optimizer, self.method, self.memory, self._average, self._engine, self._heads)

    def _average_all(self) -> None:
        """Average the weights of heads that were added, and no longer those that were frozen."""
        if self._average is not None:
            self._average.follow(map(uncompiled, self.model.modules()))
