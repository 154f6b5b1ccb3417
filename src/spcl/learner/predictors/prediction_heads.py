"""The heads that predict, made when they are needed and kept until the next step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from spcl.batches import split
from spcl.engine.model import SharedModel
from spcl.errors import SpclError
from spcl.learner.predictors.base import PREDICTORS, StepSamples, StoredFeatures
from spcl.memory import Memory
from spcl.memory.task_buffer import TaskBuffer
from spcl.registry import Named, named_options

__all__ = ["PredictionHeads"]

BATCH = 1024


class PredictionHeads:
    """The heads by which the classifiers of a model predict.

    They are made again after a step, and once a task has begun or ended.

    Args:
        predict_by: one of ``PREDICTORS``, by name or by name and options.
        memory: the samples that heads are made from.
    """

    def __init__(self, predict_by: Named, memory: Memory | None) -> None:
        self._name, _ = named_options(predict_by, "predictor")
        self._predictor = PREDICTORS.make(predict_by)
        self._memory = memory
        self._heads: dict[str, nn.Module] = {}
        self._version: object = None

    @property
    def are_trained(self) -> bool:
        """Whether they are the trained heads themselves."""
        return not self._predictor.needs_memory

    def check_memory(self) -> None:
        """Refuse to train without the memory that heads are made from; a loaded model predicts without."""
        if self._predictor.needs_memory and self._memory is None:
            raise SpclError(f"predict_by is {self._name!r}, which needs the samples of a memory; pass memory=")

    @contextmanager
    def applied(self, model: SharedModel) -> Iterator[None]:
        """Let classifiers have these heads within the block, in which the model must be evaluating."""
        self._refresh(model)
        before = {task: task.head for task in model.classifiers if task.name in self._heads}
        try:
            for task in before:
                task.head = self._heads[task.name]
            yield
        finally:
            for task, head in before.items():
                task.head = head

    def observe(self, samples: StepSamples, memory_batch: int | None) -> None:
        """Receive the targets that a step was trained on."""
        if self._memory is not None and samples:
            self._version = None
            self._predictor.observe(samples, self._memory, memory_batch)

    def _refresh(self, model: SharedModel) -> None:
        version = self._current_version(model)
        if self._memory is None or self.are_trained or version == self._version:
            return
        buffers = self._memory.buffers
        stored = {
            task.name: _stored_features(model, buffers[task.name])
            for task in model.classifiers
            if task.head is not None and task.name in buffers and buffers[task.name].size
        }
        heads = self._new_heads(model)
        self._predictor.fit(heads, stored, model.has_joint_logits)
        if self._predictor.keeps_heads:
            heads |= {name: head for name, head in self._heads.items() if name not in stored}
        self._heads, self._version = heads, version

    def _current_version(self, model: SharedModel) -> object:
        return [(task.name, task.finished, task.head is None) for task in model.classifiers]

    def _new_heads(self, model: SharedModel) -> dict[str, nn.Module]:
        heads = {}
        for task in model.classifiers:
            if task.head is not None and task.classes is not None and model.feature_dim is not None:
                head = self._predictor.new_head(task.head, model.feature_dim, task.classes)
                if head is not None:
                    heads[task.name] = head.to(model.device).eval().requires_grad_(False)
        return heads

    def state_dict(self) -> dict[str, Any]:
        """Return the present heads by task, and the state of what makes them."""
        heads = {name: head.state_dict() for name, head in self._heads.items()}
        return {"heads": heads, "predictor": self._predictor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], model: SharedModel, are_current: bool) -> None:
        """Restore from :meth:`state_dict`; unless heads are current, they are made again when they are needed."""
        new = self._new_heads(model)
        for name, values in state["heads"].items():
            new[name].load_state_dict(values)
        self._heads = {name: new[name] for name in state["heads"]}
        self._predictor.load_state_dict(state["predictor"])
        self._version = self._current_version(model) if are_current else None


def _stored_features(model: SharedModel, buffer: TaskBuffer) -> StoredFeatures:
    """Return features and labels of the samples of a task in memory."""
    inputs = buffer.take_inputs(np.arange(buffer.size))
    with torch.no_grad(), model.precision():
        features = [model.backbone(model.on_device(part)) for part in split(inputs, BATCH)]
    labels = torch.from_numpy(buffer.labels[: buffer.size]).to(model.device)
    return StoredFeatures(torch.cat(features).to(model.dtype), labels)
