"""What a run is made of, from its settings: its data laid out in time, and its learner."""

import copy
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spcl._util.registry import named_options
from spcl.batches import Inputs, map_leaves, number_of_samples
from spcl.data import (
    DATA,
    DATA_NAMES,
    PRESETS,
    SOURCE_BENCHMARKS,
    ImageData,
    SourceData,
    from_folder,
    from_npz,
    load_data,
)
from spcl.data.protocol import (
    LABEL_SETS,
    Configuration,
    Protocol,
    check_configuration,
    draw_protocol,
    draw_timeline,
    fit,
    in_paradigm,
    load_protocol,
)
from spcl.data.samples import SourceSamples, hold_out
from spcl.distributed import World
from spcl.encoders import ENCODERS
from spcl.engine.eager import augmented
from spcl.errors import DataError, SpclError, did_you_mean, is_out_of_memory
from spcl.learner import Learner
from spcl.learner.parameters import matching
from spcl.losses import LOSSES, Loss
from spcl.memory import MEMORIES, Memory
from spcl.methods import make_method
from spcl.methods.base import MEMORY
from spcl.models import BACKBONES, Backbone, InputSpec, Normalise, Standardise
from spcl.optimizers import OPTIMIZERS
from spcl.options import OPTIONS
from spcl.runs.settings import RunSettings
from spcl.schedules import SCHEDULES
from spcl.streams import ParallelStream, StreamTask, Timeline
from spcl.tasks import TaskDescription
from spcl.transforms import compose

FEW_STEPS = 5


@dataclass(frozen=True)
class Problem:
    """The data of a run, laid out in time.

    Attributes:
        data: training and test samples.
        configuration: label set and timeline of the sources; of data of several sources, the classes of all tasks are
            numbered through.
        stream: the moments.
        tests: the samples each source is evaluated on, with labels local to its task.
        tasks: what each task predicts.
        unseen: the samples of sources that are never trained.
        task_of: the name of the task that each source answers, unseen ones included.
    """

    data: ImageData | SourceData
    configuration: Configuration
    stream: ParallelStream
    tests: dict[str, tuple[Inputs, Tensor]]
    tasks: dict[str, TaskDescription]
    unseen: dict[str, tuple[Inputs, Tensor]]
    task_of: dict[str, str]

    @property
    def asked(self) -> dict[str, TaskDescription]:
        """What each source is asked: the description of its task."""
        return {source: self.tasks[task] for source, task in self.task_of.items()}

    @property
    def shares_tasks(self) -> bool:
        """Whether sources are something else than tasks."""
        return any(source != task for source, task in self.task_of.items())

    @property
    def inputs(self) -> list[InputSpec]:
        """Shape and type of the samples of every task, or of all together where all have one kind."""
        if not isinstance(self.data, SourceData):
            return inputs_of(self.data)
        return [
            reduce(or_, [InputSpec.of(each.train_x) for each in self.data.sources if each.task_name == task])
            for task in self.tasks
        ]


def make_problem(settings: RunSettings, device: torch.device, data: ImageData | SourceData | None = None) -> Problem:
    """Lay out the given data in time, by default the data that the settings name; warn if a task has very few steps."""
    problem = lay_out(settings, load_samples(settings, data), device)
    warn_of_few_steps([problem])
    return problem


def load_samples(settings: RunSettings, data: ImageData | SourceData | None = None) -> ImageData | SourceData:
    """Load the data, with a part of the training samples as test samples where ``validation`` is positive.

    Args:
        settings: the settings of a run.
        data: used instead of the data that the settings name, if given.
    """
    if data is None:
        data = load_benchmark(settings.benchmark, settings.data_dir, **settings.data)
    return hold_out(data, settings.validation) if settings.validation else data


def lay_out(settings: RunSettings, data: ImageData | SourceData, device: torch.device) -> Problem:
    """Lay out loaded data in time, on the device."""
    if isinstance(data, SourceData):
        problem = _lay_out_sources(settings, data, device)
        names = [name for source in data.sources if source.classes for name in source.class_names]
    else:
        problem, names = _lay_out_classes(settings, data, device), list(data.class_names)
    check_losses(problem.tasks.values(), names, settings)
    return problem


def _lay_out_classes(settings: RunSettings, data: ImageData, device: torch.device) -> Problem:
    """Lay out data whose classes are split into tasks; domain-incrementally, into the sources of one task."""
    if settings.at_once is not None:
        raise SpclError(f"at_once is for data of several sources, but {data.name} has none; leave it out")
    configuration = _stretched(settings, _configuration(settings, data))
    if settings.scenario == "domain":
        return _lay_out_domains(settings, data, configuration, device)
    stream = ParallelStream(
        data.train_x.to(device),
        data.train_y,
        configuration.label_set,
        configuration.timeline,
        settings.batch_size,
        settings.seed,
        epochs=settings.epochs,
    )
    counts = torch.bincount(data.train_y, minlength=data.classes).tolist()
    tasks = {
        name: TaskDescription(
            name=name,
            classes=len(classes),
            class_names=tuple(data.class_names[label] for label in classes),
            class_counts=tuple(counts[label] for label in classes),
        )
        for name, classes in zip(stream.names, configuration.label_set, strict=True)
    }
    tests = _test_samples(data, configuration, stream.names, device)
    return Problem(data, configuration, stream, tests, tasks, {}, {name: name for name in tasks})


SHARED_TASK = "classes"
"""The name of the task of all classes, where parts of them are the domains."""


def _lay_out_domains(
    settings: RunSettings, data: ImageData, configuration: Configuration, device: torch.device
) -> Problem:
    """Lay out data whose classes are split into sources of one task: its classes appear over time."""
    x, members = data.train_x.to(device), [torch.isin(data.train_y, torch.tensor(c)) for c in configuration.label_set]
    parts = [
        StreamTask(f"task-{number}", x[own.to(device)], data.train_y[own], data.classes, SHARED_TASK)
        for number, own in enumerate(members)
    ]
    stream = ParallelStream.of_tasks(
        parts, configuration.timeline, settings.batch_size, settings.seed, epochs=settings.epochs
    )
    counts = torch.bincount(data.train_y, minlength=data.classes).tolist()
    task = TaskDescription(
        name=SHARED_TASK, classes=data.classes, class_names=tuple(data.class_names), class_counts=tuple(counts)
    )
    local = _test_samples(data, configuration, stream.names, device)
    tests = {
        name: (x, torch.tensor(classes)[y])
        for (name, (x, y)), classes in zip(local.items(), configuration.label_set, strict=True)
    }
    task_of = dict.fromkeys(stream.names, SHARED_TASK)
    return Problem(data, configuration, stream, tests, {SHARED_TASK: task}, {}, task_of)


def warn_of_few_steps(problems: Iterable[Problem]) -> None:
    """Warn once if a task of these problems, which share their data, trains for very few steps."""
    steps, batch_size, name = min(
        (min(problem.configuration.timeline.durations), problem.stream.batch_size, problem.data.name)
        for problem in problems
    )
    if steps < FEW_STEPS:
        warnings.warn(
            f"a task of {name} trains for only {steps} step{'s' if steps > 1 else ''} at batch_size = {batch_size}; "
            "choose a smaller batch_size, more epochs or fewer tasks, or give more samples",
            stacklevel=3,
        )


def make_protocol(settings: RunSettings, data: ImageData | SourceData) -> Protocol:
    """Read the protocol that the settings name, or draw one for the data: timelines, and label sets unless fixed."""
    if isinstance(data, SourceData):
        raise DataError(
            f"{data.name} has no classes to split into tasks: each of its sources is a task; use no protocol"
        )
    if settings.protocol is None:
        return _drawn_protocol(settings, data)
    protocol = load_protocol(Path(settings.protocol).expanduser())
    if protocol.classes != data.classes:
        raise DataError(
            f"the protocol {settings.protocol} has {protocol.classes} classes, but {data.name} has {data.classes}; "
            f"choose the protocol of this benchmark"
        )
    return protocol


def _drawn_protocol(settings: RunSettings, data: ImageData) -> Protocol:
    """Draw timelines, and label sets unless the benchmark has its own for this number of tasks."""
    if settings.tasks is None:
        raise SpclError(f"settings: tasks is null, but {data.name} has classes to split into tasks; give a number")
    label_set = LABEL_SETS.get(settings.benchmark, ())
    return draw_protocol(
        data.classes,
        settings.tasks,
        data.train_y,
        settings.batch_size,
        settings.protocol_seed,
        overlap=settings.overlap,
        gap=settings.gap,
        benchmark=data.name,
        label_set=label_set if len(label_set) == settings.tasks else None,
    )


def _configuration(settings: RunSettings, data: ImageData) -> Configuration:
    configuration = make_protocol(settings, data).configuration(settings.config)
    if settings.fit:
        configuration = fit(configuration, data.train_y, settings.batch_size)
    return in_paradigm(configuration, settings.paradigm)


def _stretched(settings: RunSettings, configuration: Configuration) -> Configuration:
    return replace(configuration, timeline=configuration.timeline.stretched(settings.epochs))


def _lay_out_sources(settings: RunSettings, data: SourceData, device: torch.device) -> Problem:
    """Lay out data of several sources, each a task, or one of those that answer a task."""
    _check_sources(settings, data)
    order, timeline = _laid_out(settings, data)
    sources = [data.trained[place] for place in order]
    drawn = in_paradigm(Configuration((), timeline, settings.config), settings.paradigm)
    timeline = _stretched(settings, drawn).timeline
    parts = [
        StreamTask(each.name, _on(device, each.train_x), each.train_y, each.classes, each.task_name) for each in sources
    ]
    stream = ParallelStream.of_tasks(parts, timeline, settings.batch_size, settings.seed, epochs=settings.epochs)
    by_task: dict[str, list[SourceSamples]] = {}
    for source in sources:
        by_task.setdefault(source.task_name, []).append(source)
    tests = {each.name: (_on(device, each.test_x), each.test_y) for each in [*sources, *data.sources]}
    return Problem(
        data,
        Configuration(stream.label_set, timeline, settings.config),
        stream,
        {each.name: tests[each.name] for each in sources},
        {task: _description(task, members) for task, members in by_task.items()},
        {each.name: tests[each.name] for each in data.sources if each.unseen},
        {each.name: each.task_name for each in [*sources, *data.sources]},
    )


def _description(task: str, sources: Sequence[SourceSamples]) -> TaskDescription:
    """Return what sources are asked that answer one task."""
    first, counts = sources[0], [each.class_counts for each in sources]
    return TaskDescription(
        name=task,
        kind=first.kind,
        classes=first.outputs,
        class_names=first.class_names or None,
        class_counts=tuple(map(sum, zip(*counts, strict=True))) if all(counts) else None,
    )


ORDERS = 3
"""The number of orders of sources; for each there are as many timelines."""


def _laid_out(settings: RunSettings, data: SourceData) -> tuple[list[int], Timeline]:
    """Return the order of the trained sources and their timeline, one of nine that are drawn.

    With ``at_once``, configuration 3·i + j has order i and timeline j; else the order is the order in the data.
    """
    durations = [-(-len(source.train_y) // settings.batch_size) for source in data.trained]
    if settings.at_once is None:
        timeline = draw_timeline(
            durations, settings.config, settings.protocol_seed, overlap=settings.overlap, gap=settings.gap
        )
        return list(range(len(durations))), timeline
    check_configuration(settings.config, ORDERS * ORDERS)
    which, variant = divmod(settings.config, ORDERS)
    order = np.random.default_rng([settings.protocol_seed, which]).permutation(len(durations)).tolist()
    drawn = np.random.SeedSequence([settings.protocol_seed, ORDERS + variant]).generate_state(1)[0]
    return order, Timeline.at_once([durations[place] for place in order], settings.at_once, int(drawn))


def _check_sources(settings: RunSettings, data: SourceData) -> None:
    """Refuse settings that do not fit data of several sources."""
    if settings.protocol is not None:
        raise DataError(
            f"the sources of {data.name} have tasks, so that the protocol {settings.protocol} does not apply; "
            f"leave it out, and the timeline is drawn by protocol_seed"
        )
    if settings.tasks not in (None, len(data.trained)):
        raise DataError(
            f"{data.name} has {len(data.trained)} sources to train, but tasks = {settings.tasks}; leave tasks out"
        )
    tasks = list(dict.fromkeys(source.task_name for source in data.sources))
    if settings.scenario == "domain" and len(tasks) > 1:
        raise DataError(
            f"the sources of {data.name} answer {len(tasks)} tasks, but domain-incrementally there is one; choose "
            f"another scenario"
        )
    for source in data.sources:
        if source.name in ("", MEMORY):
            raise DataError(f"{data.name} has a source named {source.name!r}; give it another name")
        others = [each for each in data.sources if each is not source]
        if any(source.name == each.task_name for each in others):
            raise DataError(f"{data.name} has a source and a task of others named {source.name!r}; rename one of them")
        if settings.scenario == "class" and source.kind != "classification":
            raise SpclError(
                f"source {source.name!r} of {data.name} is a {source.kind}, which has no place among the classes of a "
                f"class-incremental run; choose scenario = task"
            )
        if source.kind == "regression" and bool((source.test_y == source.test_y[0]).all()):
            raise DataError(
                f"source {source.name!r} of {data.name}: all test targets are equal, which leaves R² undefined; give "
                f"test samples with different targets"
            )


def _on(device: torch.device, x: Inputs) -> Inputs:
    return map_leaves(lambda part: part.to(device), x)


def _test_samples(
    data: ImageData, configuration: Configuration, names: Sequence[str], device: torch.device
) -> dict[str, tuple[Inputs, Tensor]]:
    tests: dict[str, tuple[Inputs, Tensor]] = {}
    for name, classes in zip(names, configuration.label_set, strict=True):
        local = torch.full((data.classes,), -1)
        local[list(classes)] = torch.arange(len(classes))
        labels = local[data.test_y]
        members = labels >= 0
        if not members.any():
            raise DataError(f"{name}: its classes {list(classes)} have no test sample, so it cannot be evaluated")
        tests[name] = (data.test_x[members].to(device), labels[members])
    return tests


# -- loading


FOLDER_OPTIONS = ("size", "mode")


def load_benchmark(benchmark: str, data_dir: str | None = None, **options: Any) -> ImageData | SourceData:
    """Load data by name or path.

    Args:
        benchmark: a known benchmark, a data set of a plug-in, a folder of pictures, or an .npz file.
        data_dir: where the files of known benchmarks are.
        options: ``size`` and ``mode`` of a folder of pictures, ``kind`` of an .npz file, or the options of a plug-in's
            data set.

    >>> load_benchmark("ps-glyphs", size=64)
    Traceback (most recent call last):
    spcl.errors.DataError: the data ps-glyphs has no option 'size'; leave it out
    """
    path = Path(benchmark).expanduser()
    if benchmark in SOURCE_BENCHMARKS:
        return _load_named(SOURCE_BENCHMARKS[benchmark].data, data_dir, options)
    if benchmark in PRESETS:
        _check_options(benchmark, options)
        return load_data(benchmark, data_dir)
    if not (_is_path(benchmark) or path.exists()):
        return _load_named(benchmark, data_dir, options)
    if path.is_dir():
        _check_options(benchmark, options, FOLDER_OPTIONS)
        return from_folder(path, **options)
    if path.suffix == ".npz" and path.exists():
        _check_options(benchmark, options, ("kind",))
        return from_npz(path, **options)
    fault = "is neither a folder nor an .npz file" if path.exists() else "does not exist"
    raise DataError(
        f"the data {benchmark} {fault}; give a folder of pictures, an .npz file or one of {', '.join(PRESETS)}"
    )


def is_named_data(benchmark: str) -> bool:
    """Return whether the text is the name of a known benchmark or of a plug-in's data set, or a path.

    >>> is_named_data("ps-emnist"), is_named_data("/data/pictures"), is_named_data("custom")
    (True, True, False)
    """
    return benchmark in PRESETS or _is_path(benchmark) or benchmark in DATA


def check_given_data(settings: RunSettings, data: ImageData | SourceData | None) -> None:
    """Raise an error unless the settings name the given data or, where none is given, data that can be loaded."""
    if data is None and not is_named_data(settings.benchmark) and not Path(settings.benchmark).exists():
        raise DataError(
            f"the data {settings.benchmark!r} is no known benchmark, no path and no data set of a plug-in; if it came "
            f"from Python, pass it again as data="
        )
    if data is not None and data.name != settings.benchmark:
        raise DataError(
            f"the settings are for the data {settings.benchmark!r}, but the data given is {data.name!r}; "
            f"make them with resolve_settings(…, data=data)"
        )
    if data is not None and settings.data:
        raise DataError(f"data is given, but so are options of its loader ({', '.join(settings.data)}); leave them out")


def _is_path(benchmark: str) -> bool:
    path = Path(benchmark).expanduser()
    return "/" in benchmark or len(path.parts) > 1 or path.suffix == ".npz"


def _load_named(name: str, data_dir: str | None, options: dict[str, Any]) -> ImageData | SourceData:
    """Make a plug-in's data set."""
    if name not in DATA:
        hint = did_you_mean(name, [*dict.fromkeys([*DATA_NAMES, *DATA])])
        raise DataError(f"unknown data set {name!r}, and there is no such file or folder in {Path.cwd()}; {hint}")
    data = DATA.make({"name": name, **options}, data_dir=data_dir)
    if not isinstance(data, ImageData | SourceData):
        raise DataError(f"the data set {name!r} must be ImageData or SourceData, but it is {type(data).__name__}")
    return data


def _check_options(benchmark: str, options: dict[str, Any], known: tuple[str, ...] = ()) -> None:
    for option in options:
        if option not in known:
            hint = f"choose from {', '.join(known)}" if known else "leave it out"
            raise DataError(f"the data {benchmark} has no option {option!r}; {hint}")


# -- the learner


SAMPLES_FOR_NORMALISATION = 10_000


def make_learner(
    settings: RunSettings,
    data: ImageData | SourceData,
    device: torch.device,
    steps: int,
    distributed: World | None = None,
) -> Learner:
    """Make the untrained learner of a run of ``steps`` steps; seeds PyTorch's global generator."""
    torch.manual_seed(settings.seed)
    options = learner_options(settings)
    options["memory_batch"] = options["memory_batch"] or settings.batch_size
    parts = learner_parts(settings, data, device, steps)
    if settings.encoder is not None:
        for samples in _training_samples(data):  # an encoder that cannot take them raises now, not later
            ENCODERS.make(settings.encoder, map_leaves(lambda part: part[:2], samples))
    if parts["augment"] is not None:
        # a transform that cannot take the samples is refused now, not in a step
        few = [map_leaves(lambda part: part[:2].clone(), samples) for samples in _training_samples(data)]
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            augmented(copy.deepcopy(parts["augment"]), few, device)
    return Learner(**parts, **options, distributed=distributed)


def learner_options(settings: RunSettings) -> dict[str, Any]:
    """Return the arguments of a new ``Learner`` that settings say directly; a loaded one has them in its state."""
    plain = {name: getattr(settings, option.setting) for name, option in OPTIONS.items()}
    return plain | {"autocast": torch.bfloat16 if settings.precision == "bfloat16" else None}


def learner_parts(
    settings: RunSettings, data: ImageData | SourceData | Sequence[InputSpec], device: torch.device, steps: int
) -> dict[str, Any]:
    """Make the parts of the learner of a run of ``steps`` steps, as arguments of ``Learner`` and ``Learner.load``.

    For a learner that is loaded, the :func:`inputs_of` the data are enough, since its state has the statistics of the
    training samples.
    """
    name, options = named_options(settings.method, "method")
    method = make_method(name, **options)
    return {
        "backbone": make_backbone(settings, data, device),
        "method": method,
        "optimizer": partial(make_optimizer, settings),
        "memory": make_memory(settings, method.edits_memory, device),
        "schedule": None if settings.schedule == "constant" else SCHEDULES.make(settings.schedule, steps),
        "augment": compose(settings.augment) if settings.augment else None,
    }


def inputs_of(data: ImageData | SourceData) -> list[InputSpec]:
    """Return shape and type of the training samples, of every source where there are several."""
    return [InputSpec.of(x) for x in _training_samples(data)]


def make_backbone(
    settings: RunSettings, data: ImageData | SourceData | Sequence[InputSpec], device: torch.device
) -> nn.Module:
    """Make the shared network on its device; bytes are normalised by statistics of (a part of) the training data,
    or scaled to 0…1.

    Where sources have samples of several shapes or types, bytes reach the network as they are, and a network that
    cannot take the samples of every source is refused.
    """
    kinds = inputs_of(data) if isinstance(data, ImageData | SourceData) else data
    inputs = replace(reduce(or_, kinds), sources=tuple(kinds) if len(kinds) > 1 else ())
    momentum = settings.batch_norm_momentum
    backbone: nn.Module = BACKBONES.make(settings.backbone, inputs, batch_norm_momentum=momentum).to(device)
    if settings.normalise and isinstance(data, ImageData | SourceData):
        _fit_standardisation(backbone, data)
    for parameter in matching(backbone, settings.frozen) if settings.frozen else ():
        parameter.requires_grad_(False)
    if device.type == "cuda":
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if isinstance(data, SourceData) and any(kind != kinds[0] for kind in kinds):
        _check_takes(backbone, settings, data, device)
    if any(kind.parts is not None or kind.dtype != torch.uint8 or kind.shape != inputs.shape for kind in kinds):
        return backbone
    if not settings.normalise or not isinstance(data, ImageData | SourceData):
        channels = inputs.shape[0]
        return Backbone(Normalise([0.0] * channels, [1.0] * channels).to(device), backbone)
    images = _training_samples(data)
    every = max(1, sum(map(len, images)) // SAMPLES_FOR_NORMALISATION)
    sample = torch.cat([x[::every] for x in images]).to(device)
    std, mean = torch.std_mean(sample.float() / 255, dim=[0, 2, 3])
    return Backbone(Normalise(mean.tolist(), std.clamp(min=1e-3).tolist()).to(device), backbone)


def _fit_standardisation(backbone: nn.Module, data: ImageData | SourceData) -> None:
    """Fit modules that standardise the inputs to (a part of) the training samples, without sources held out."""
    sources = data.sources if isinstance(data, SourceData) else [data]
    samples = [each.train_x for each in sources if not getattr(each, "unseen", False)]
    every = max(1, sum(map(number_of_samples, samples)) // SAMPLES_FOR_NORMALISATION)
    for module in backbone.modules():
        if isinstance(module, Standardise):
            fitting = [x for x in samples if isinstance(x, Tensor) and x.shape[-1] == len(module.mean)]
            module.fit(torch.cat([x[::every].flatten(0, -2) for x in fitting]))


def _check_takes(backbone: nn.Module, settings: RunSettings, data: SourceData, device: torch.device) -> None:
    """Raise an error unless a copy of the backbone returns features for two samples of every source."""
    tried = copy.deepcopy(backbone).eval()
    for source in data.sources:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                found = tuple(tried(map_leaves(lambda part: part[:2].to(device), source.train_x)).shape)
            fault = None if len(found) == 2 and found[0] == min(2, len(source.train_y)) else f"it returns {found}"
        except Exception as error:  # a plug-in may fail in any way
            if is_out_of_memory(error):
                raise
            fault = str(error).partition("\n")[0]
        if fault is not None:
            name, _ = named_options(settings.backbone, "backbone")
            raise SpclError(
                f"backbone {name!r} cannot take the samples of source {source.name!r} of {data.name} "
                f"({InputSpec.of(source.train_x)}): {fault}; give the sources samples of one shape and type, or a "
                f"backbone of your own, which finds the samples of all sources in inputs.sources"
            )


def _training_samples(data: ImageData | SourceData) -> list[Any]:
    return [source.train_x for source in data.sources] if isinstance(data, SourceData) else [data.train_x]


def make_memory(settings: RunSettings, edited: bool, device: torch.device) -> Memory | None:
    """Make the replay memory, or None for a budget of 0; memory whose samples a method edits stores floats."""
    if not settings.memory_budget:
        return None
    dtype = torch.float32 if edited else None
    memory: Memory = MEMORIES.make(
        settings.memory, settings.memory_budget, seed=settings.seed, device=device, dtype=dtype
    )
    return memory


def make_optimizer(settings: RunSettings, parameters: list[nn.Parameter]) -> Optimizer:
    """Make the optimiser that the settings name, for these parameters."""
    optimizer: Optimizer = OPTIMIZERS.make(settings.optimizer, parameters, lr=settings.learning_rate)
    return optimizer


# -- devices by name


USUAL = ("auto", "cpu", "cuda", "cuda:0", "mps")


class DeviceError(SpclError):
    """A device that cannot compute here."""


def check_device(name: str) -> None:
    """Refuse a name that PyTorch does not know; whether there is such a device here is another question.

    >>> check_device("cuda:7")
    >>> check_device("gpu:1")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no device 'gpu:1'; did you mean 'cuda:1'?
    """
    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError:
        kind, colon, number = name.partition(":")
        hint = f"did you mean 'cuda{colon}{number}'?" if kind.lower() == "gpu" else did_you_mean(name, USUAL)
        raise SpclError(f"there is no device {name!r}; {hint}") from None


def pick_device(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # "meta" has tensors, but no values in them
    except (RuntimeError, AssertionError, ImportError) as error:
        has_none = name.partition(":")[0] == "mps" and not torch.backends.mps.is_available()
        reason = "there is none on this machine" if has_none else str(error).splitlines()[0]
        raise DeviceError(f"cannot use device {name!r}: {reason}; choose another, such as cpu") from error
    return device


# -- heads and losses of tasks


PLAIN_LOSS = "cross-entropy"


def add_source(learner: Learner, source: str, problem: Problem, settings: RunSettings) -> None:
    """Add a source of a run to the learner, with the encoder that the settings name, and its task if that is new."""
    task = problem.task_of[source]
    if task not in learner.tasks:
        add_task(learner, problem.tasks[task], settings)
    if task != source or settings.encoder is not None:
        learner.add_source(source, task=task, encoder=settings.encoder)


def add_task(learner: Learner, task: TaskDescription, settings: RunSettings) -> None:
    """Add a task of a run to the learner: a classifier, or a linear head with the loss of the task's kind."""
    if task.kind == "classification":
        names = task.class_names or ()
        named = all(names) and len(set(names)) == task.classes  # published names may repeat
        loss = make_losses([task], settings).get(task.name)
        learner.add_task(task.name, classes=names if named else task.classes, loss=loss)
    else:
        head, loss = make_heads([task], learner.model.backbone, settings)[task.name]
        learner.add_task(task.name, head=head, loss=loss)


def make_losses(tasks: Iterable[TaskDescription], settings: RunSettings) -> dict[str, Loss]:
    """Make the losses of classification tasks, as :meth:`Learner.load` takes them; none for plain cross-entropy."""
    if settings.loss == PLAIN_LOSS:
        return {}
    return {task.name: _loss(task, settings) for task in tasks if task.kind == "classification"}


def check_losses(tasks: Iterable[TaskDescription], class_names: Iterable[str], settings: RunSettings) -> None:
    """Raise an error if cross-entropy does not fit these tasks, or weighs a class that the data does not have.

    Args:
        tasks: of a run.
        class_names: of all classes of the data; the data may have classes that no task has.
        settings: of the run.
    """
    name, options = named_options(settings.loss, "loss")
    if name != PLAIN_LOSS:
        return
    make_losses(tasks, settings)
    weights = options.get("class_weights")
    known = sorted(set(class_names))
    for weighted in map(str, weights) if isinstance(weights, Mapping) else ():
        if weighted not in known:
            hint = did_you_mean(weighted, known) if known else "it has no classes"
            raise SpclError(f"class_weights of the loss names {weighted!r}, no class of {settings.benchmark}; {hint}")


def make_heads(
    tasks: Iterable[TaskDescription], backbone: nn.Module, settings: RunSettings
) -> dict[str, tuple[nn.Module, Loss]]:
    """Make head and loss of every task that is not a classification, as :meth:`Learner.load` takes them.

    The weights of a head depend on the seed and the task's name only.
    """
    others = [task for task in tasks if task.kind != "classification"]
    return {task.name: (_linear(task, backbone, settings.seed), _loss(task, settings)) for task in others}


def _loss(task: TaskDescription, settings: RunSettings) -> Loss:
    by_kind = {
        "classification": settings.loss,
        "regression": settings.regression_loss,
        "multilabel": settings.multilabel_loss,
    }
    loss: Loss = LOSSES.make(by_kind[task.kind], task)
    return loss


def _linear(task: TaskDescription, backbone: nn.Module, seed: int) -> nn.Module:
    features = getattr(backbone, "feature_dim", None)
    if not isinstance(features, int):
        raise SpclError(
            f"task {task.name!r} is a {task.kind}, whose head must know the number of features; "
            f"give the backbone {type(backbone).__name__} the attribute feature_dim"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed * 1_000_003 + zlib.crc32(task.name.encode()))
        return nn.Linear(features, task.classes or 1)
