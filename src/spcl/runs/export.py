"""Export of a trained model: a program for PyTorch alone, or ONNX, with a description beside it."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import spcl
from spcl._util.files import scratch_path, user_errors, write_json
from spcl.batches import Inputs, leaves
from spcl.errors import SpclError, install_command
from spcl.learner import Learner
from spcl.models import InputSpec
from spcl.runs.trained import TrainedRun, asked_task, assemble, check_task

__all__ = ["DESCRIPTION", "describe_export", "export_run"]

DESCRIPTION = "spcl.json"
"""The name of the description among the extra files of a PyTorch program."""

TRACED, CHECKED = 2, 3  # batch sizes; a program that is specialised to the first fails the check

Compute = Callable[[Any], Tensor]


def export_run(run: TrainedRun, path: str | Path, task: str | None = None, source: str | None = None) -> None:
    """Write the model of a run, for batches of any size, to a file, and its description to ``<file>.json``.

    A PyTorch program (``.pt2``) is loaded with ``torch.export.load(path).module()`` and needs nothing of this package.
    ONNX (``.onnx``) needs the packages onnx and onnxscript to be written. Outputs are compared with the model's before
    the file is put in place.

    Args:
        run: the run.
        path: the file, whose suffix is the format.
        task: whose head to export; None, class-incremental, exports the logits of all classes seen.
        source: whose encoder to export in front of the network; None, for somebody who was never trained.
    """
    task = asked_task(run, task, source)
    inputs, path = check_task(run, task), Path(path)
    write = FORMATS.get(path.suffix)
    if write is None:
        raise SpclError(f"cannot export to {path}; give a file that ends in {' or '.join(FORMATS)}")
    learner = run.learner("cpu")
    module = learner.module(task, source=source)
    description = describe_export(run, learner, task) | ({} if source is None else {"source": source})
    with user_errors(path), scratch_path(path) as scratch:
        with _export_errors(run):
            program = write(module, inputs, scratch, description)
        _check(module, program, inputs)
        write_json(path.with_name(f"{path.name}.json"), description)  # first: a model without it would be of no use
        scratch.replace(path)


def describe_export(run: TrainedRun, learner: Learner, task: str | None) -> dict[str, Any]:
    """Return what the inputs and outputs of an exported model mean."""
    names = [each.name for each in learner.model.classifiers] if task is None else [task]
    kind = run.tasks[names[0]].kind
    return {
        "spcl": spcl.__version__,
        "benchmark": None if run.result is None else run.settings.benchmark,
        "method": run.settings.method["name"],
        "scenario": run.settings.scenario,
        "task": task,
        "input": check_task(run, task).state_dict(),
        "kind": kind,
        "output": "values" if kind == "regression" else "logits",
        "columns": [{"task": name, "class": each} for name in names for each in run.tasks[name].output_names],
    }


def _write_program(module: nn.Module, inputs: InputSpec, path: Path, description: Mapping[str, Any]) -> Compute:
    program = torch.export.export(module, (_example(inputs, TRACED),), dynamic_shapes=(_any_batch_size(inputs),))
    content = io.BytesIO()  # where a file cannot be written, as on a full disk, PyTorch ends the process
    torch.export.save(program, content, extra_files={DESCRIPTION: json.dumps(description, ensure_ascii=False)})
    path.write_bytes(content.getbuffer())
    with path.open("rb") as file:  # the suffix of the temporary file would be refused
        return torch.export.load(file).module()


def _write_onnx(module: nn.Module, inputs: InputSpec, path: Path, description: Mapping[str, Any]) -> Compute:
    try:
        import onnx
        import onnx.reference
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SpclError(f"ONNX needs onnx and onnxscript ({error}); run: {install_command('onnx')}") from error
    names = ["x"] if inputs.parts is None else list(inputs.parts)
    program = torch.onnx.export(
        module,
        (_example(inputs, TRACED), {}),  # else PyTorch takes a dict of inputs for keyword arguments
        dynamo=True,
        verbose=False,
        dynamic_shapes=(_any_batch_size(inputs),),
        input_names=names,
        output_names=[description["output"]],
    )
    assert program is not None
    program.save(path)
    evaluator = onnx.reference.ReferenceEvaluator(onnx.load(path))

    def compute(x: Inputs) -> Tensor:
        feeds = {name: part.numpy() for name, part in zip(names, leaves(x).values(), strict=True)}
        (output,) = evaluator.run(None, feeds)
        return torch.from_numpy(output)

    return compute


def _check(module: nn.Module, compute: Compute, inputs: InputSpec) -> None:
    """Raise an error if the exported model computes something else than the model on random samples."""
    x = _example(inputs, CHECKED)
    with torch.no_grad():
        expected, found = module(x), compute(x)
    if found.shape != expected.shape or not _close(found, expected):
        raise SpclError(
            "the exported model gives other outputs than the model itself on random samples, so nothing was written; "
            "its backbone may do what an export cannot follow"
        )


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def _example(inputs: InputSpec, count: int) -> Inputs:
    """Return random samples."""
    parts = inputs.parts or {"x": inputs}
    return assemble(inputs, {name: _random(part, count) for name, part in parts.items()})


def _random(inputs: InputSpec, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (count, *inputs.shape)
    if inputs.dtype.is_floating_point:
        return torch.rand(size, generator=generator, dtype=inputs.dtype)
    end = inputs.vocabulary or 256
    return torch.randint(0, end, size, generator=generator).to(inputs.dtype)


def _any_batch_size(inputs: InputSpec) -> Any:
    batch = {0: Dim("batch", min=1)}
    return assemble(inputs, dict.fromkeys(inputs.parts or ("x",), batch))


@contextmanager
def _export_errors(run: TrainedRun) -> Iterator[None]:
    """Raise what an exporter raises as one line, without its warnings."""
    exporters = logging.getLogger("torch.onnx")
    level = exporters.level
    exporters.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about itself
            yield
    except (SpclError, OSError):
        raise
    except Exception as error:  # exporters raise many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SpclError(f"the model of the run in {run.path} cannot be exported: {reason}") from error
    finally:
        exporters.setLevel(level)


FORMATS = {".pt2": _write_program, ".onnx": _write_onnx}
