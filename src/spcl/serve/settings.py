"""The settings of a service, from a YAML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from spcl._util.files import read_secret
from spcl._util.registry import Named
from spcl._util.validation import tagged, validated
from spcl.batches import Inputs, describe
from spcl.encoders import ENCODERS
from spcl.errors import DataError, SpclError, did_you_mean
from spcl.models import InputSpec
from spcl.options import LEARNER
from spcl.runs import RunSettings, load_settings_file, resolve_settings
from spcl.sources import announce
from spcl.tasks import Kind

PATHS = ((None, "state"), ("source", "path"), ("source", "password_file"), ("http", "token_file"))
"""The settings that are paths, each with its section."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class InputSettings(_Section):
    """Shape and type of the samples that the backbone is built for; every task has the same.

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

    def description(self) -> str:
        """Return type and shape of one sample, as :func:`spcl.batches.describe` gives them.

        >>> InputSettings(shape=(4,)).description()
        'float32[4]'
        """
        if self.parts is None:
            return describe(self._no_samples(), 1)
        return describe(_joined({name: part._no_samples() for name, part in self.parts.items()}), 1)

    def samples(self, values: Any) -> Inputs:
        """Return samples as tensors.

        Args:
            values: a list with one entry per sample, each a number or nested lists of numbers; for inputs with several
                parts a dict of such lists, by name or, where samples are tuples, by position.

        >>> InputSettings(shape=(2,)).samples([[1, 2], [3, 4]])
        tensor([[1., 2.],
                [3., 4.]])
        >>> InputSettings(shape=(2,)).samples([[1, 2], [3]])
        Traceback (most recent call last):
        ...
        spcl.errors.DataError: the inputs are no samples of float32[2]: expected sequence of length 2 at dim 1 (got 1)
        """
        if self.parts is None:
            return self._tensor(values, "the inputs")
        if not isinstance(values, Mapping) or values.keys() != self.parts.keys():
            found = f"parts {list(values)}" if isinstance(values, Mapping) else f"a {type(values).__name__}"
            raise DataError(f"the inputs are {found}; give an object with the parts {list(self.parts)}")
        return _joined(
            {name: part._tensor(values[name], f"part {name!r} of the inputs") for name, part in self.parts.items()}
        )

    def _no_samples(self) -> Tensor:
        spec = self.spec()
        return torch.empty((0, *spec.shape), dtype=spec.dtype)

    def _tensor(self, values: Any, owner: str) -> Tensor:
        try:
            return torch.tensor(values, dtype=self.spec().dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DataError(f"{owner} are no samples of {self.dtype}{list(self.shape)}: {error}") from None


def _joined(parts: dict[str, Tensor]) -> Inputs:
    """Return parts as a tuple where their names are the numbers from 0, in any order, and else as they are."""
    numbers = [str(index) for index in range(len(parts))]
    return tuple(parts[number] for number in numbers) if parts.keys() == set(numbers) else parts


class TaskSettings(_Section):
    """When tasks start and end."""

    start: Literal["announced", "first-sight"] = Field(
        "announced", description="by an announcement or a request; or also with the first batch"
    )
    kind: Kind = Field("classification", description="of a task that starts on first sight")
    classes: int | None = Field(None, ge=1, description="or outputs, of a task that starts on first sight")
    end: Literal["announced", "silence"] = Field("announced", description="by an announcement; or also after silence")
    silence_seconds: float = Field(
        60.0, gt=0.0, description="without a batch until a task counts as silent, or ends by silence"
    )


class SourceSettings(_Section):
    """What a source answers where its announcement does not say it."""

    task: str | None = Field(None, description="the task that it answers; by default one of its own name")
    encoder: Named | None = Field(None, description="its encoder; by default the learner's setting")


class HttpSettings(_Section):
    """The HTTP interface; the token is never in the file itself."""

    host: str = Field("127.0.0.1", description="address to listen on; others than loopback need a token")
    port: int = Field(8800, ge=0, le=65535, description="0 for any free one")
    token_variable: str | None = Field(None, description="environment variable that holds the bearer token")
    token_file: Path | None = Field(None, description="file that holds the bearer token")
    max_bytes: int = Field(16 * 2**20, ge=1, description="largest body of a request")

    def token(self) -> str | None:
        """Return the bearer token; None where none is configured."""
        return read_secret("token", self.token_variable, self.token_file)


class ServeSettings(_Section):
    """Everything that decides a service.

    >>> settings = ServeSettings(state="state", source="folder", inputs=InputSettings(shape=(4,)))
    >>> settings.run_settings().backbone, settings.run_settings().memory
    ('mlp', 'reservoir')
    """

    state: Path = Field(description="folder of the checkpoint; one running service per folder")
    source: Named = Field(description="where batches come from: folder or redis, with its options")
    inputs: InputSettings = Field(description="of all tasks")
    learner: dict[str, Any] = Field(default={}, description="method, backbone, optimizer, …, as of a run")
    tasks: TaskSettings = Field(TaskSettings(), description="when tasks start and end")
    sources: dict[str, SourceSettings] = Field(
        default={}, description="by name: tasks and encoders of sources that do not announce them"
    )
    together: bool = Field(
        False, description="wait for a batch of every task in every step: reproducible, at the pace of the slowest"
    )
    max_bytes: int = Field(64 * 2**20, ge=1, description="largest message of a source")
    checkpoint_seconds: float = Field(10.0, ge=0.0, description="time between checkpoints; 0 saves after every step")
    keep_checkpoints: int = Field(
        3, ge=2, description="kept checkpoints; batches stay in the hub until all of them hold what they taught"
    )
    ready_seconds: float = Field(
        30.0, gt=0.0, description="until /readyz fails when training, the hub or saving is stuck"
    )
    http: HttpSettings = Field(HttpSettings(), description="the HTTP interface")

    @field_validator("sources")
    @classmethod
    def _possible(cls, sources: dict[str, SourceSettings]) -> dict[str, SourceSettings]:
        for name, source in sources.items():
            announce(name, classes=1, task=source.task, encoder=source.encoder)
            if source.encoder is not None:
                ENCODERS.check(source.encoder)
        return sources

    def run_settings(self, memory: Named = "reservoir") -> RunSettings:
        """Return the learner's settings, complete and checked.

        Args:
            memory: used where the settings name none. The default also holds samples of running tasks, so that the
                model predicts new tasks well from the beginning.
        """
        known = tagged(RunSettings, LEARNER)
        for name in self.learner:
            if name not in known:
                raise SpclError(f"learner: there is no setting {name!r}; {did_you_mean(name, known)}")
        return resolve_settings({} if "memory" in self.learner else {"memory": memory}, self.learner)

    @classmethod
    def of(cls, values: dict[str, Any], owner: str = "settings") -> Self:
        """Return checked settings, or raise one error that lists what is wrong in them."""
        sections: dict[str, type[_Section]] = {"inputs": InputSettings, "tasks": TaskSettings, "http": HttpSettings}
        parts: dict[str, Any] = {
            name: validated(section, values[name], f"{owner}, {name}")
            for name, section in sections.items()
            if isinstance(values.get(name), dict)
        }
        if isinstance(sources := values.get("sources"), dict):
            parts["sources"] = {
                name: validated(SourceSettings, each, f"{owner}, source {name!r}") for name, each in sources.items()
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
