"""TorchJD's aggregators as methods."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchjd.aggregation import Aggregator

from matrices import normal
from method_runs import is_elementwise, new_learner, paused, run, tensors
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.methods import Gradients, MethodSettings, TorchJD, aggregators, make_method

EXTRAS = {
    "CAGrad": ("cagrad", ["cvxpy", "clarabel"]),
    "NashMTL": ("nash_mtl", ["cvxpy", "ecos"]),
    "UPGrad": ("quadprog_projector", ["qpsolvers", "quadprog"]),
    "DualProj": ("quadprog_projector", ["qpsolvers", "quadprog"]),
}
NEEDED: dict[str, dict[str, Any]] = {
    "CAGrad": {"c": 0.5},
    "FairGrad": {"alpha_": 1.0},
    "TrimmedMean": {"trim_number": 0},
}
FIXED = {"Constant": {"weights": [1.0, 2.0, 3.0]}, "Krum": {"n_byzantine": 0}}  # not for every number of gradients

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
quiet_solvers = pytest.mark.filterwarnings("ignore:You are solving a parameterized:UserWarning")  # of cvxpy


def missing(name: str) -> list[str]:
    return [package for package in EXTRAS.get(name, ("", []))[1] if find_spec(package) is None]


def made(name: str, **settings: Any) -> TorchJD:
    if missing(name):
        pytest.skip(f"needs {', '.join(missing(name))}")
    method = make_method(f"torchjd:{name}", **(NEEDED.get(name, {}) | FIXED.get(name, {}) | settings))
    assert isinstance(method, TorchJD)
    return method


def native(method: TorchJD, tasks: int) -> Aggregator:
    """Return the aggregator itself."""
    settings = method.settings.model_dump(exclude=set(MethodSettings.model_fields))
    arguments = {
        name.rstrip("_"): torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for name, value in settings.items()
    }
    return method.aggregator(**arguments, **({"n_tasks": tasks} if method.name.endswith("NashMTL") else {}))


def update(method: TorchJD, J: Tensor, names: tuple[str, ...]) -> Tensor:
    if is_elementwise(method):
        return method.combine(J.clone())
    return method.weigh(Gradients(names, np.ones(len(J)), J @ J.T)).values @ J


@quiet_solvers
@pytest.mark.parametrize("name", aggregators())
def test_update_equals_the_aggregators(name: str) -> None:
    method = made(name)
    aggregator = native(method, 3)
    for seed in range(3):  # several steps, since some have state
        J = normal(3, 5, seed)
        torch.manual_seed(seed)
        expected = aggregator(J)
        torch.manual_seed(seed)
        torch.testing.assert_close(update(method, J, ("a", "b", "memory")), expected, rtol=1e-6, atol=1e-9)


@quiet_solvers
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", [name for name in aggregators() if name not in FIXED])
def test_runs_and_resumes_exactly(name: str, device: str, tmp_path: Path) -> None:
    def make() -> Learner:
        return new_learner(made(name), "task", device=device)

    whole = make()
    run(whole, 0)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(whole))
    for pause in (3, 6):
        resumed = paused(make, pause, tmp_path / "checkpoint", device)
        assert repr(resumed.method) == repr(whole.method)
        for found, expected in zip(tensors(resumed), tensors(whole), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["GradVac", "PCD"])
def test_state_belongs_to_the_gradients_by_name(name: str) -> None:
    """State is reset for other gradients, and kept for the same ones."""
    J = [normal(2, 5, seed) for seed in range(3)]
    method = made(name)
    torch.manual_seed(0)
    update(method, J[0], ("a", "b"))
    state = method.state_dict()
    fresh, goes_on = made(name), made(name)
    goes_on.load_state_dict(state)
    torch.manual_seed(0)
    others = update(method, J[1], ("a", "c"))
    torch.manual_seed(0)
    anew = update(fresh, J[1], ("a", "c"))
    torch.manual_seed(0)
    same = update(goes_on, J[1], ("a", "b"))
    assert torch.equal(others, anew)
    assert not torch.equal(same, anew)


@pytest.mark.parametrize("name", ["GradVac", "PCD", "ExcessMTL"])
def test_a_state_is_a_copy(name: str) -> None:
    method = made(name)
    update(method, normal(2, 5, 0), ("a", "b"))
    state = method.state_dict()
    before = {key: value.clone() for key, value in state["rule"].items() if isinstance(value, Tensor)}
    update(method, normal(2, 5, 1), ("a", "b"))
    assert before
    for key, value in before.items():
        assert torch.equal(state["rule"][key], value)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_extra_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchjd._mixins.find_spec", lambda _: None)  # as if nothing were installed
    with pytest.raises(SpclError, match=rf'method \'torchjd:{name}\'.*pip install "torchjd\[{EXTRAS[name][0]}\]"'):
        make_method(f"torchjd:{name}", **NEEDED.get(name, {}))


@pytest.mark.parametrize(("name", "message"), [("Constant", "3 rows"), ("Krum", "at least 3 rows")])
def test_a_number_of_gradients_that_does_not_fit_is_explained(name: str, message: str) -> None:
    with pytest.raises(SpclError, match=rf"method 'torchjd:{name}' cannot combine 1 gradients: .*{message}"):
        run(new_learner(made(name), "task"), 0)


def test_vectors_work_in_the_precision_of_the_gradients() -> None:
    def step(method: TorchJD) -> Tensor:
        learner = new_learner(method, "task")
        before = learner.model.backbone[0].weight.detach().clone()
        learner.optimizer = torch.optim.SGD(learner.model.backbone.parameters(), lr=1.0)
        run(learner, 0, 1)
        return before - learner.model.backbone[0].weight.detach()

    torch.testing.assert_close(step(made("Constant", weights=[2.0])), 2 * step(made("Sum")))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("torchjd:Constant", {}, "weights must be given"),
        (
            "torchjd:CAGrad",
            {},
            r"'torchjd:CAGrad': c must be given, because torchjd.aggregation.CAGrad .* float, .*c=…",
        ),
        ("torchjd:CAGrad", {"norm_eps": 0.1}, "c must be given"),
        ("torchjd:FairGrad", {"alpha": 0.1}, "alpha_ must be given"),
        ("torchjd:Constant", {"weights": "many"}, "weights = 'many'"),
        ("torchjd:MGDA", {"epsilon": -1.0}, "method 'torchjd:MGDA': epsilon must be positive"),
        ("torchjd:MGDA", {"epsilom": 1.0}, "did you mean 'epsilon'\\?"),
        ("torchjd:AlignedMTL", {"scale_mode": "max"}, "scale_mode = 'max'"),
        ("torchjd:NashMTL", {"n_tasks": 3}, "there is no setting 'n_tasks'"),
        ("torchjd:upgrad", {}, "there is no method 'torchjd:upgrad'; did you mean 'torchjd:UPGrad'\\?"),
        ("torchjd:Weighting", {}, "there is no method 'torchjd:Weighting'"),
        ("torchjd:GramianWeightedAggregator", {}, "there is no method"),
    ],
)
def test_wrong_settings_and_names_are_explained(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpclError, match=message):
        make_method(name, **settings)


def test_an_argument_named_like_a_shared_setting_gets_an_underscore() -> None:
    method = make_method("torchjd:FairGrad", alpha_=2.0, alpha=0.1)
    assert isinstance(method, TorchJD)
    assert method.settings.alpha == 0.1
    assert native(method, 2).alpha == 2.0
