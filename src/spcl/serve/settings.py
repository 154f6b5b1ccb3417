"""The settings of a service, from a YAML file."""

import os
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from spcl.errors import SpclError
from spcl.losses import TaskKind
from spcl.models import InputSpec
from spcl.registry import Named
from spcl.runs import RunSettings, load_settings_file, resolve_settings
from spcl.suggestions import did_you_mean
from spcl.validation import validated

__all__ = ["LEARNER", "HttpSettings", "InputSettings", "ServeSettings", "TaskSettings", "load_serve_settings"]

LEARNER = (
    "plugins",
    "scenario",
    "method",
    "seed",
    "backbone",
    "batch_norm_momentum",
    "learning_rate",
    "optimizer",
    "clip_norm",
    "loss",
    "regression_loss",
    "multilabel_loss",
    "augment",
    "memory",
    "memory_budget",
    "memory_batch",
    "updates",
    "average",
    "predict_by",
    "frozen",
    "stability",
    "device",
    "precision",
    "capture",
    "low_memory",
    "threads",
)
"""The settings of a run that are settings of a service's learner, too; the others are about data and evaluation."""

PATHS = ((None, "state"), ("source", "path"), ("http", "token_file"))
"""The settings that are paths, each with its section."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class InputSettings(_Section):
    """Shape and type of the samples that the backbone is built for, those of every task.

    >>> InputSettings(shape=(3, 32, 32), dtype="uint8").spec().shape
    (3, 32, 32)
    """

    shape: tuple[int, ...] = Field((), description="of one sample, without the dimension of the batch")
    dtype: str = Field("float32", description="float32, uint8 for images as bytes, int64 for tokens, …")
    vocabulary: int | None = Field(None, ge=1, description="for tokens, one more than the largest")
    parts: "dict[str, InputSettings] | None" = Field(
        None, min_length=1, description="the inputs of every part where samples are dicts; of tuples, by index"
    )

    @field_validator("dtype")
    @classmethod
    def _known(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError("it is no type of a tensor, such as float32")
        return name

    def spec(self) -> InputSpec:
        """Return what the backbone is built for."""
        dtype = getattr(torch, self.dtype)
        if self.parts is None:
            return InputSpec(self.shape, dtype, self.vocabulary)
        parts = {name: part.spec() for name, part in self.parts.items()}
        first = next(iter(parts.values()))
        return InputSpec(first.shape, first.dtype, first.vocabulary, parts)


class TaskSettings(_Section):
    """When tasks start and end."""

    start: Literal["announced", "first-sight"] = Field(
        "announced", description="by an announcement or a request; or also with the first batch"
    )
    kind: TaskKind = Field("classification", description="of a task that starts on first sight")
    classes: int | None = Field(None, ge=1, description="or outputs, of a task that starts on first sight")
    end: Literal["announced", "silence"] = Field("announced", description="by an announcement; or also after silence")
    silence_seconds: float = Field(
        60.0, gt=0.0, description="without a batch until a task counts as silent, or ends by silence"
    )


class HttpSettings(_Section):
    """The HTTP interface; the token is never in the file itself."""

    host: str = Field("127.0.0.1", description="address to listen on; others than loopback need a token")
    port: int = Field(8800, ge=0, le=65535, description="0 for any free one")
    token_variable: str | None = Field(None, description="environment variable that holds the bearer token")
    token_file: Path | None = Field(None, description="file that holds the bearer token")
    max_bytes: int = Field(16 * 2**20, ge=1, description="largest body of a request")

    def token(self) -> str | None:
        """Return the bearer token; None where none is configured."""
        if self.token_variable is not None:
            found, where = os.environ.get(self.token_variable, ""), f"the environment variable {self.token_variable}"
        elif self.token_file is not None:
            try:
                found, where = self.token_file.read_text(encoding="utf-8").strip(), str(self.token_file)
            except (OSError, UnicodeDecodeError) as error:
                raise SpclError(f"the token cannot be read from {self.token_file}: {error}") from None
        else:
            return None
        if not found:
            raise SpclError(f"{where} holds no token; put one there, or configure none")
        return found


class ServeSettings(_Section):
    """Everything that decides a service.

    >>> settings = ServeSettings(state="state", source="folder", inputs=InputSettings(shape=(4,)))
    >>> settings.run_settings().backbone
    'mlp'
    """

    state: Path = Field(description="folder of the checkpoint; one running service per folder")
    source: Named = Field(description="where batches come from: folder or redis, with its options")
    inputs: InputSettings = Field(description="of all tasks")
    learner: dict[str, Any] = Field(default={}, description="method, backbone, optimizer, …, as those of a run")
    tasks: TaskSettings = Field(TaskSettings(), description="when tasks start and end")
    together: bool = Field(
        False, description="wait for a batch of every task in every step: reproducible, at the pace of the slowest"
    )
    max_bytes: int = Field(64 * 2**20, ge=1, description="largest message of a source")
    checkpoint_seconds: float = Field(10.0, ge=0.0, description="time between checkpoints; 0 saves after every step")
    http: HttpSettings = Field(HttpSettings(), description="the HTTP interface")

    def run_settings(self) -> RunSettings:
        """Return the learner's settings, complete and checked."""
        for name in self.learner:
            if name not in LEARNER:
                raise SpclError(f"learner: there is no setting {name!r}; {did_you_mean(name, LEARNER)}")
        return resolve_settings(self.learner)

    @classmethod
    def of(cls, values: dict[str, Any], owner: str = "settings") -> Self:
        """Return checked settings, or raise one error that lists what is wrong in them."""
        sections: dict[str, type[_Section]] = {"inputs": InputSettings, "tasks": TaskSettings, "http": HttpSettings}
        parts: dict[str, Any] = {
            name: validated(section, values[name], f"{owner}, {name}")
            for name, section in sections.items()
            if isinstance(values.get(name), dict)
        }
        settings = validated(cls, values | parts, owner)
        settings.run_settings()
        return settings


def load_serve_settings(path: str | Path) -> ServeSettings:
    """Read the settings of a service from a YAML file; relative paths in it start from its folder."""
    values = load_settings_file(path)
    folder = Path(path).resolve().parent
    for section, name in PATHS:
        part = values if section is None else values.get(section)
        if isinstance(part, dict) and isinstance(given := part.get(name), str):
            part[name] = str(folder / Path(given).expanduser())
    learner = values.get("learner")
    if isinstance(learner, dict) and isinstance(plugins := learner.get("plugins"), list):
        learner["plugins"] = [_plugin(folder, plugin) for plugin in plugins]
    return ServeSettings.of(values, f"the settings {path}")


def _plugin(folder: Path, plugin: Any) -> Any:
    is_file = isinstance(plugin, str) and plugin.endswith(".py")
    return str(folder / Path(plugin).expanduser()) if is_file else plugin
