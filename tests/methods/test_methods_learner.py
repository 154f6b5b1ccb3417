"""Every method through the learner beyond what tests/testing/test_ours.py checks: learning, settings, costs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from method_runs import new_learner, paused, run, tensors
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.methods import METHODS, cost_of, make_method

every_method = pytest.mark.parametrize("name", METHODS)
scenarios = pytest.mark.parametrize("scenario", ["task", "class"])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@every_method
def test_captured_graphs_resume_exactly(name: str, tmp_path: Path) -> None:
    def make() -> Learner:
        return new_learner(make_method(name), "task", device="cuda")

    whole = make()
    run(whole, 0)
    resumed = paused(make, 5, tmp_path / "checkpoint", "cuda")
    for found, expected in zip(tensors(resumed), tensors(whole), strict=True):
        assert torch.equal(found, expected)


@every_method
def test_learns_tasks_that_run_side_by_side(name: str) -> None:
    torch.manual_seed(0)
    learner = Learner(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh()), make_method(name), optimizer=partial(torch.optim.Adam, lr=0.02)
    )
    x = torch.randn(64, 6)
    batches = {"a": (x, (x[:, 0] > 0).long()), "b": (x, (x[:, 1] > 0).long())}
    for task in batches:
        learner.add_task(task, classes=2)
    for _ in range(60):
        learner.step(batches)
    for task, (inputs, labels) in batches.items():
        assert (learner.predict(inputs, task) == labels).double().mean() > 0.9


# -- settings


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dwa", {"temprature": 1.0}, "method 'dwa': there is no setting 'temprature'; did you mean 'temperature'\\?"),
        ("dwa", {"temperature": 0.0}, "temperature = 0.0: Input should be greater than 0"),
        ("graddrop", {"leek": 0.1}, "did you mean 'leak'\\?"),
        ("graddrop", {"leak": 1.5}, "leak = 1.5"),
        ("mega", {"epsilom": 0.1}, "did you mean 'epsilon'\\?"),
        ("mega", {"epsilon": -1.0}, "epsilon = -1.0"),
        ("mdmtr", {"task_margins": 0.1}, "did you mean 'task_margin'\\?"),
        ("mdmtr", {"scale": 0.0}, "scale = 0.0"),
        ("der++", {"logits_weight": 0.1}, "did you mean 'logit_weight'\\?"),
        ("der++", {"label_weight": -0.1}, "label_weight = -0.1"),
        ("gmed", {"regularization": 0.1}, "did you mean 'regularisation'\\?"),
        ("gmed", {"decay": 1.1}, "decay = 1.1"),
        ("emgd", {"temperatur": 1.0}, "did you mean 'temperature'\\?"),
        ("emgd", {"momentum": 1.0}, "momentum = 1.0"),
        ("mgda", {"max_iters": 3}, "there is no setting 'max_iters'; choose one of adaptive, alpha, decoupled"),
        ("pc-grad", {}, "there is no method 'pc-grad'; did you mean 'pcgrad'\\?"),
        ("agem", {}, "did you mean 'a-gem'\\?"),
        ("derpp", {}, "there is no method 'derpp'; did you mean 'der\\+\\+'\\?"),
        ("GradDrop", {}, "did you mean 'graddrop'\\?"),
        ("zzz", {}, "there is no method 'zzz'; choose one of mgda, dwa, .*, or load the plug-in that defines it"),
    ],
)
def test_wrong_settings_and_names_are_explained(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpclError, match=message):
        make_method(name, **settings)


@every_method
def test_declarations_are_complete(name: str) -> None:
    method = make_method(name)
    assert method.name == name == name.lower()
    assert method.family in ("MTL", "SCL", "PCL")
    assert (method.reduction == "mean") == (method.family == "SCL")
    assert method.summary
    assert method.reference.split(", ")[-1].split()[-1].isdigit() or "TPAMI" in method.reference
    assert all(field.description for field in type(method.settings).model_fields.values())


# -- costs


def test_costs_follow_from_what_a_method_declares() -> None:
    costs = {name: cost_of(make_method(name)) for name in METHODS}
    assert {name for name, cost in costs.items() if cost.gradients == "T + 1"} == {
        *("mgda", "graddrop", "pcgrad", "maxdo", "emgd", "soro"),
        *("normsum", "scaledsum", "procrustes", "soro-kappa", "spcl"),
    }
    assert costs["soro+dbt"].gradients == "T + 2"
    assert cost_of(make_method("er", alpha=0.1)).gradients == "3"
    assert {name: cost.forwards for name, cost in costs.items() if cost.forwards} == {"gmed": 2, "der++": 1}
    assert {name: cost.memory for name, cost in costs.items() if cost.memory != "samples"} == {
        "gmed": "samples as floats",
        "der++": "samples and logits",
        "spcl": "samples and logits",
    }


@pytest.mark.parametrize("name", ["mgda", "dwa", "er", "soro+dbt"])
@pytest.mark.parametrize("stability", [False, True])
def test_the_gradients_of_the_table_are_those_that_are_held(name: str, stability: bool) -> None:
    learner = new_learner(make_method(name), "task")
    learner.measure_stability = stability
    run(learner, 0)
    cost, tasks = cost_of(learner.method), 2  # at most at once, beside memory
    expected = eval(cost.gradients_with_stability if stability else cost.gradients, {"T": tasks})
    assert len(learner._engine.gradients.buffer) == expected
