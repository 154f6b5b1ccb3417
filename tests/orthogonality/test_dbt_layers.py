"""Which layers the orthogonality penalty is on, and the ablation that compares it with none."""

from pathlib import Path

import pytest
import torch

from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.methods import SORODBT
from spcl.models import MLP, SmallCNN
from spcl.results.figures import FIGURES, MissingRunsError, draw_figure
from spcl.results.records import read_runs
from tiny_runs import two_task_runs


def change_of_weights(alpha: float, layers: str) -> dict[str, torch.Tensor]:
    """Return how one step of plain SGD changes the weights of a network with convolutions and a linear layer."""
    torch.manual_seed(0)
    backbone = SmallCNN(channels=1, image_size=18)
    before = {name: value.detach().clone() for name, value in backbone.named_parameters()}
    method = SORODBT(alpha=alpha, layers=layers, decoupled=True)
    learner = Learner(backbone, method, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    learner.add_task("a", classes=2)
    learner.step({"a": (torch.randn(4, 1, 18, 18, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 2)})
    return {name: value.detach() - before[name] for name, value in backbone.named_parameters()}


def test_the_penalty_can_be_on_convolutions_alone() -> None:
    without, everywhere, convolutions = (
        change_of_weights(*each) for each in ((0.0, "all"), (1e-2, "all"), (1e-2, "convolutions"))
    )
    for name in without:
        is_penalised = name.endswith("weight")
        is_convolution = name.startswith("convolutions")
        expected = everywhere if is_convolution else without
        torch.testing.assert_close(convolutions[name], expected[name])
        assert torch.allclose(everywhere[name], without[name]) != is_penalised


def test_a_network_without_convolutions_is_refused() -> None:
    learner = Learner(MLP(4), SORODBT(layers="convolutions"))
    learner.add_task("a", classes=2)
    with pytest.raises(SpclError, match="none of the 2 convolutions and linear layers is chosen"):
        learner.step({"a": (torch.randn(4, 4), torch.arange(4) % 2)})


def test_the_ablation_compares_conditions_of_one_alpha(tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = read_runs(two_task_runs(Path(tmp_path_factory.getbasetemp())))
    assert "α = 1e-05" in draw_figure(FIGURES["ablation"], runs).caption
    for run in runs:
        if run.method == "er" and run.settings["method"]["alpha"]:
            run.settings["method"]["alpha"] = 1e-3
    with pytest.raises(MissingRunsError, match="with one α"):
        draw_figure(FIGURES["ablation"], runs)


def test_the_command_of_the_ablation_sweeps_alpha_for_both_methods() -> None:
    (grid,) = FIGURES["ablation"].grids
    assert grid.methods == "er,soro"
    assert grid.sweeps == ("method.alpha=0,1e-5",)
