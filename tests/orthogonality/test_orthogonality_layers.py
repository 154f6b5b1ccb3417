"""Choosing layers, and adding the gradient to given buffers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from spcl.errors import SpclError
from spcl.orthogonality import add_orthogonality_gradient, filter_statistics, orthogonality_penalty
from spcl.orthogonality.layers import find_layers
from spcl.orthogonality.penalty import _joint_penalty, layer_penalty, layers_penalty

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.ConvTranspose2d(6, 2, 2, stride=2)),
        nn.Conv2d(2, 5, 1),
        nn.Linear(5, 3),
    ).double()


def test_layers_are_chosen_by_predicate_or_name() -> None:
    net = network()
    convolutions = ["0", "2.0", "3"]
    assert list(filter_statistics(net)) == ["0", "2.0", "2.1", "3", "4"]
    assert list(filter_statistics(net, lambda _, layer: isinstance(layer, nn.Conv2d))) == convolutions
    assert list(filter_statistics(net, lambda name, _: name.startswith("2."))) == ["2.0", "2.1"]
    assert list(filter_statistics(net, reversed(convolutions))) == convolutions
    assert list(filter_statistics(net, "2.0")) == ["2.0"]
    assert list(filter_statistics(net[0])) == [""]


def test_unknown_name_is_reported_with_a_suggestion() -> None:
    net = nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 2)})
    with pytest.raises(SpclError, match=r"'stemm'; did you mean 'stem'\?"):
        orthogonality_penalty(net, ["head", "stemm"])
    with pytest.raises(SpclError, match=r"'norm'; choose one of stem, head"):
        orthogonality_penalty(net, ["norm"])


def test_choosing_nothing_is_an_error() -> None:
    with pytest.raises(SpclError, match="none of the 5"):
        orthogonality_penalty(network(), lambda name, layer: False)
    with pytest.raises(SpclError, match="none of the 0"):
        orthogonality_penalty(nn.ReLU())


def autograd_gradients(net: nn.Module) -> dict[nn.Parameter, Tensor]:
    weights = [p for p in net.parameters() if p.dim() > 1]
    return dict(zip(weights, torch.autograd.grad(orthogonality_penalty(net), weights), strict=True))


def flat_views(net: nn.Module, flat: Tensor) -> dict[nn.Parameter, Tensor]:
    parameters = list(net.parameters())
    parts = flat.split([p.numel() for p in parameters])
    return {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}


def test_gradient_is_added_to_views_of_one_flat_tensor() -> None:
    net = network()
    flat = torch.randn(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    before, views = flat.clone(), flat_views(net, flat)
    penalty = add_orthogonality_gradient(net, views, alpha=0.3)
    torch.testing.assert_close(penalty, orthogonality_penalty(net).detach())
    assert not penalty.requires_grad
    expected = autograd_gradients(net)
    for parameter, start in flat_views(net, before).items():
        torch.testing.assert_close(views[parameter], start + 0.3 * expected.get(parameter, torch.zeros(())))


def test_only_the_chosen_layers_need_buffers() -> None:
    net = network()
    gradient = torch.zeros_like(net[3].weight)
    penalty = add_orthogonality_gradient(net, {net[3].weight: gradient}, layers=["3"])
    torch.testing.assert_close(penalty, orthogonality_penalty(net[3]).detach())
    torch.testing.assert_close(gradient, autograd_gradients(net)[net[3].weight])


def test_buffers_may_have_any_memory_layout() -> None:
    net = network()
    buffers = {p: torch.zeros(p.shape[::-1], dtype=p.dtype).permute(*range(p.dim())[::-1]) for p in net.parameters()}
    add_orthogonality_gradient(net, buffers)
    for parameter, expected in autograd_gradients(net).items():
        torch.testing.assert_close(buffers[parameter], expected)


def test_frozen_weights_count_but_need_no_buffer() -> None:
    net = network()
    expected = orthogonality_penalty(net).detach()
    net[0].requires_grad_(False)
    buffers = {p: torch.zeros_like(p) for p in net.parameters() if p.requires_grad}
    torch.testing.assert_close(add_orthogonality_gradient(net, buffers), expected)


def test_invalid_buffers_are_refused_before_anything_is_added() -> None:
    net = network()
    zeros = {p: torch.zeros_like(p) for p in net.parameters()}
    with pytest.raises(SpclError, match=r"no buffer for the weight of '4'"):
        add_orthogonality_gradient(net, {p: b for p, b in zeros.items() if p is not net[4].weight})
    with pytest.raises(SpclError, match=r"buffer for '4' has shape \(15,\), but its weight \(3, 5\)"):
        add_orthogonality_gradient(net, {**zeros, net[4].weight: torch.zeros(15)})
    weight_norm(net[4])
    with pytest.raises(SpclError, match=r"'4' is computed from other parameters"):
        add_orthogonality_gradient(net, zeros)
    assert all(not buffer.any() for buffer in zeros.values())


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_batched_layers_equal_single_layers(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(4, 4, 3, groups=2) for _ in range(3)), nn.Conv2d(4, 4, 3, stride=2)).to(device)
    net[1].weight.requires_grad_(False)
    layers = find_layers(net)
    together, apart = ([None if layer.name == "1" else torch.ones_like(layer.weight) for layer in layers] for _ in "ab")
    groups = [[0, 2], [1], [3]]
    joint = [_joint_penalty([(layers[i], together[i]) for i in group], 0.5) for group in groups]
    single = [layer_penalty(layer, gradient, 0.5) for layer, gradient in zip(layers, apart, strict=True)]
    torch.testing.assert_close(torch.stack(joint).sum(), torch.stack(single).sum())
    torch.testing.assert_close(layers_penalty(layers, [None] * 4), torch.stack(single).sum())
    for one, other in zip(together, apart, strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other)
