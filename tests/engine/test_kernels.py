"""Triton kernels against PyTorch: on a GPU, and interpreted where there is none."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from spcl.engine import layers
from spcl.engine.rows import GradientMatrix, ReductionPlan
from spcl.engine.segmented import SegmentedMode
from spcl.engine.segments import SegmentGradients, Segments, UnsupportedError
from spcl.models import ResNet18

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what masks leave out

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16  # the interpreter rounds to bfloat16 otherwise, and multiplies no such matrices


@pytest.fixture(autouse=True)
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on this device, and so few chunks at a time that their sums take several turns."""
    monkeypatch.setattr(layers, "DEVICES", {DEVICE})
    monkeypatch.setattr("spcl.engine.kernels.batch_norm.COMBINED", {"CHUNKS": 2, "CHANNELS": 16})
    monkeypatch.setattr("spcl.engine.kernels.convolution.SUMMED", {"CHUNKS": 2, "NUMBERS": 128})
    monkeypatch.setattr("spcl.engine.kernels.convolution.LEAST_ROWS", 64)


class Operations(TorchDispatchMode):
    """Notes the names of PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def images(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def difference(value: Tensor, reference: Tensor) -> float:
    return float((value.detach().double() - reference.detach().double()).norm() / reference.detach().double().norm())


# -- batch-norm


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("follows", ["", "relu", "add", "add relu", "relu pool"])
@pytest.mark.parametrize(("sizes", "channels", "side"), [((3, 5), 16, 6), ((2,) * 3, 70, 2)])
def test_batch_norm_of_several_batches_is_that_of_each(
    sizes: tuple[int, ...], channels: int, side: int, follows: str, dtype: torch.dtype
) -> None:
    from spcl.engine.kernels.batch_norm import BatchNorm, BatchNormOptions

    generator = torch.Generator().manual_seed(0)
    shape = sum(sizes), channels, side, side
    x = (3 * images(*shape, generator=generator) + 5).to(dtype).requires_grad_()
    addend = (
        images(*shape, generator=generator, dtype=dtype).contiguous().requires_grad_() if "add" in follows else None
    )
    weight, bias = (torch.randn(channels, generator=generator).to(DEVICE) for _ in range(2))
    mine, theirs = ((torch.zeros(channels, device=DEVICE), torch.ones(channels, device=DEVICE)) for _ in range(2))
    found: list[Tensor] = []
    options = BatchNormOptions(
        sizes, 0.3, 1e-5, "relu" in follows, "pool" in follows, lambda *sums: found.extend(sums), tables={}
    )
    y = BatchNorm.apply(x, addend, (weight, bias), mine, options, torch.zeros((), device=DEVICE, requires_grad=True))
    flow = images(*y.shape, generator=generator, dtype=dtype)
    leaves = [x] if addend is None else [x, addend]
    values = [y, *torch.autograd.grad(y, leaves, flow), *found]
    expected = reference_of_each(leaves, (weight, bias), theirs, sizes, flow, follows)
    exactness = 1e-5 if dtype == torch.float32 else 1e-2
    for value, reference in zip(values, expected, strict=True):
        assert difference(value, reference) < exactness
    for value, reference in zip(mine, theirs, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-4)


def reference_of_each(
    leaves: list[Tensor],
    parameters: tuple[Tensor, Tensor],
    running: tuple[Tensor, Tensor],
    sizes: tuple[int, ...],
    flow: Tensor,
    follows: str,
) -> list[Tensor]:
    """Result, gradients of images and addend, of weight and bias; a batch after the other, by PyTorch, in float32."""
    parts = []
    for *own, by in zip(*(each.float().split(sizes) for each in (*leaves, flow)), strict=True):
        inputs = [each.detach().requires_grad_() for each in (*own, *parameters)]
        x, *addend = inputs[: len(own)]
        out = functional.batch_norm(x, *running, *inputs[-2:], True, 0.3, 1e-5)
        out = out + addend[0] if addend else out
        out = out.to(flow.dtype).float() if "pool" in follows else out  # of equal pixels the first one is the largest
        out = out.relu() if "relu" in follows else out
        out = functional.max_pool2d(out, 2) if "pool" in follows else out
        parts.append((out, *torch.autograd.grad(out, inputs, by)))
    return [torch.stack(each) if each[0].ndim == 1 else torch.cat(each) for each in zip(*parts, strict=True)]


def test_statistics_are_exact_where_means_are_large() -> None:
    from spcl.engine.kernels.batch_norm import BatchNorm, BatchNormOptions

    x = 1e4 + images(6, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    running = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    options = BatchNormOptions((2, 4), 1.0, 1e-5, relu=False, pool=False, add_gradients=lambda *sums: None, tables={})
    one, zero = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    y = BatchNorm.apply(x, None, (one, zero), running, options, torch.zeros((), device=DEVICE, requires_grad=True))
    last = x[2:].double()
    assert (
        difference(y[2:], (last - last.mean((0, 2, 3), True)) / last.std((0, 2, 3), correction=0, keepdim=True)) < 1e-2
    )
    torch.testing.assert_close(running[0].double(), last.mean((0, 2, 3)))  # with momentum 1 the last batch's
    torch.testing.assert_close(running[1].double(), last.var((0, 2, 3)), rtol=1e-3, atol=0)


def test_of_equal_pixels_the_first_one_gets_the_gradient() -> None:
    from spcl.engine.kernels.batch_norm import BatchNorm, BatchNormOptions

    x = torch.tensor([[1.0, 1.0], [1.0, 1.0]]).repeat(1, 1, 2, 2).expand(2, 4, 4, 4) * torch.arange(1, 3).view(
        2, 1, 1, 1
    )
    x = x.to(DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()
    one, zero = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    found: list[Tensor] = []
    options = BatchNormOptions(
        (2,), 0.1, 1e-5, relu=True, pool=True, add_gradients=lambda *g: found.extend(g), tables={}
    )
    y = BatchNorm.apply(x, None, (one, zero), None, options, torch.zeros((), device=DEVICE, requires_grad=True))
    flow = images(*y.shape, generator=torch.Generator().manual_seed(0))
    (mine,) = torch.autograd.grad(y, x, flow)
    plain = functional.max_pool2d(functional.batch_norm(x, None, None, one, zero, True, 0.1, 1e-5).relu(), 2)
    (theirs,) = torch.autograd.grad(plain, x, flow)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_numbers_that_are_not_finite_stay_so() -> None:
    from spcl.engine.kernels.batch_norm import BatchNorm, BatchNormOptions

    x = images(4, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2, 3] = float("nan")
    one, zero = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    for pool in (False, True):
        options = BatchNormOptions((2, 2), 0.1, 1e-5, relu=True, pool=pool, add_gradients=lambda *sums: None, tables={})
        y = BatchNorm.apply(x, None, (one, zero), None, options, torch.zeros((), device=DEVICE, requires_grad=True))
        assert y[:2, 1].isnan().all()
        assert y[2:].isfinite().all()


# -- convolutions

CONVOLUTIONS = {  # images of the segments, channels, filters, side, kernel, stride, padding, dilation
    "of pictures": ((2, 3), 3, 20, 8, 3, 1, 1, 1),
    "strided": ((2, 3), 16, 24, 8, 3, 2, 1, 1),
    "shortcut": ((2, 1), 16, 8, 7, 1, 2, 0, 1),
    "dilated": ((2, 3), 20, 8, 9, 3, 1, 2, 2),
    "in several chunks": ((40, 30), 5, 8, 8, 3, 1, 1, 1),
    "of many channels": ((9, 2), 130, 20, 2, 3, 1, 1, 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_weight_gradients_of_segments_are_those_of_each(name: str) -> None:
    from spcl.engine.kernels.convolution import Geometry, convolve, has_few_columns, write_weight_gradients

    lengths, channels, filters, side, kernel, stride, padding, dilation = CONVOLUTIONS[name]
    generator, shape = torch.Generator().manual_seed(0), (filters, channels, kernel, kernel)
    x = images(sum(lengths), channels, side, side, generator=generator, dtype=HALF)
    weight = images(*shape, generator=generator, dtype=HALF)
    options = layers.ConvolutionOptions([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 1)
    y = functional.conv2d(x.float(), weight.float(), None, stride, padding, dilation)
    geometry = Geometry.of(x, weight, options)
    if has_few_columns(weight):
        assert difference(convolve(x, weight, geometry), y) < 1e-3
    flow = images(*y.shape, generator=generator, dtype=HALF)
    buffer = torch.full((4, weight.numel() + 5), 7.0, device=DEVICE)
    block = buffer.as_strided((4, *shape), (buffer.stride(0), *weight.stride()), 3)
    write_weight_gradients(x, flow, geometry, Segments(lengths, (2, 0)), block)
    for row, images_of, flow_of in zip((2, 0), x.float().split(lengths), flow.float().split(lengths), strict=True):
        expected = torch.nn.grad.conv2d_weight(images_of, shape, flow_of, stride, padding, dilation)
        assert difference(block[row], expected) < 1e-5
    untouched = [buffer[1], buffer[3], buffer[:, :3], buffer[:, -2:]]
    assert all(bool((part == 7.0).all()) for part in untouched)


# -- networks


class Residual(nn.Module):
    """A small network with all that kernels compute together."""

    def __init__(self) -> None:
        super().__init__()
        small = ResNet18(batch_norm_momentum=0.2, width=16)
        self.stem, self.stages = small.stem, small.stages[2:3]

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(x))
        return features.mean(dim=(2, 3))


class Shared(nn.Module):
    """A network that uses a layer of batch-norm and a convolution twice, and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.twice = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16, momentum=0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.first(x)))
        y = self.norm(self.twice(y)) + y
        features: Tensor = self.norm(self.twice(y.relu())).mean(dim=(2, 3))
        return features


def one_pass(
    network: nn.Module, x: Tensor, flow: Tensor, segments: Segments, defers: bool
) -> tuple[Tensor, GradientMatrix]:
    """Return features and gradients of one pass over several batches."""
    gradients = GradientMatrix(list(network.parameters()))
    gradients.begin(ReductionPlan.make(("a", "b"), "none", separate=True))
    names = {parameter: name for name, parameter in network.named_parameters()}
    counters = [buffer for name, buffer in network.named_buffers() if name.endswith("num_batches_tracked")]
    target = SegmentGradients(gradients, segments, fresh=True)
    features = SegmentedMode(segments, target, names, counters, defers).run(network, x)
    features.backward(flow.to(features.dtype))
    target.finish()
    return features, gradients


@pytest.mark.parametrize(("rows", "defers"), [((0, 1), True), ((0, 0), False)], ids=["separate", "added"])
@pytest.mark.parametrize("make", [Residual, Shared])
def test_one_pass_by_kernels_gives_the_gradients_of_a_pass_per_batch(
    make: Callable[[], nn.Module], rows: tuple[int, ...], defers: bool
) -> None:
    torch.manual_seed(0)
    network = make().to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    reference = make().to(DEVICE)
    reference.load_state_dict(network.state_dict())
    sizes, generator = (3, 5), torch.Generator().manual_seed(1)
    x = images(sum(sizes), 3, 4, 4, generator=generator, dtype=HALF)
    flow = torch.randn(sum(sizes), reference(x.float()).shape[1], generator=generator).to(DEVICE)
    reference.load_state_dict(network.state_dict())
    with Operations() as operations:
        features, gradients = one_pass(network, x, flow, Segments(sizes, rows), defers)
    assert not {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"} & operations.names
    if make is Residual:  # shared weights are added by PyTorch
        fused = {"relu", "threshold_backward", "max_pool2d_with_indices"}
        assert (fused & operations.names == set()) is defers
    expected = torch.zeros(2, gradients.length, device=DEVICE)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for row, part, by, mine in zip(rows, *(each.split(sizes) for each in (x.float(), flow, features)), strict=True):
            output = reference(part)
            assert difference(mine, output) < 2e-2
            found = torch.autograd.grad(output, list(reference.parameters()), by)
            for total, gradient in zip(gradients.views(expected[row]), found, strict=True):
                total += gradient
    for row in set(rows):
        each = zip(gradients.views(gradients.rows[row]), gradients.views(expected[row]), strict=True)
        assert max(difference(mine, theirs) for mine, theirs in each) < 0.1
    for (name, mine), theirs in zip(network.named_buffers(), reference.buffers(), strict=True):
        if make is Residual or name == "norm.num_batches_tracked":  # a layer used twice averages in another order
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2, msg=name)


def test_convolutions_of_pictures_and_weight_gradients_are_kernels() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.Flatten()).to(DEVICE, memory_format=torch.channels_last)
    x = images(4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=HALF)
    with Operations() as operations:
        one_pass(network, x, torch.ones(4, 144, device=DEVICE), Segments((1, 3), (0, 1)), defers=True)
    assert not {"convolution", "convolution_backward"} & operations.names


def test_hooks_see_activations_where_the_network_is_not_known() -> None:
    network, seen = Residual().to(DEVICE, memory_format=torch.channels_last), list[Tensor]()  # type: ignore[call-overload]
    network.stem[2].register_forward_hook(lambda module, inputs, output: seen.append(output))
    x = images(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    one_pass(network, x, torch.ones(4, 32, device=DEVICE), Segments((1, 3), (0, 1)), defers=False)
    assert [each.shape for each in seen] == [(4, 16, 8, 8)]


def test_activations_are_freed_by_the_backward_pass() -> None:
    network, kept = Residual().to(DEVICE, memory_format=torch.channels_last), list[Any]()  # type: ignore[call-overload]
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output)))
    x = images(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    held = one_pass(network, x, torch.ones(4, 32, device=DEVICE), Segments((1, 3), (0, 1)), defers=False)
    gc.collect()
    assert held
    assert [each() for each in kept] == [None] * len(kept)


def test_a_batch_of_one_pixel_is_refused_as_pytorch_refuses_it() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten()).to(DEVICE)
    x = images(3, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        one_pass(network, x, torch.ones(3, 4, device=DEVICE), Segments((1, 2), (0, 1)), defers=True)


def test_parameters_with_gaps_are_left_to_pytorch() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.weight = nn.Parameter(torch.randn(8)[::2])
    network = nn.Sequential(norm, nn.Flatten()).to(DEVICE)
    x = images(5, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    features, _ = one_pass(network, x, torch.ones(5, 16, device=DEVICE), Segments((2, 3), (0, 1)), defers=True)
    expected = torch.cat([network(part) for part in x.split((2, 3))])
    torch.testing.assert_close(features, expected)


def test_weights_are_converted_to_the_type_of_each_block() -> None:
    weights = [nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(5, 4))]
    target = SegmentGradients(GradientMatrix(weights), Segments((2, 2), (0, 1)), fresh=True)
    for dtype in (torch.bfloat16, torch.float16):
        for weight in weights:
            assert torch.equal(target.converted(weight, dtype), weight.to(dtype))


def test_layouts_that_rows_cannot_hold_are_refused() -> None:
    for sizes, rows in (((0, 10), (0, 1)), ((2, 2, 2), (0, 1, 0))):
        with pytest.raises(UnsupportedError, match="cannot be added"):
            Segments(sizes, rows)


# -- the compiler


def test_without_a_compiler_pytorch_computes_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore lines")

    monkeypatch.setattr("spcl.engine.kernels.chunks.launch_first", fail)
    layers._triton_works.cache_clear()
    x = torch.zeros(2, 3, 4, 4, device=DEVICE)
    with pytest.warns(RuntimeWarning, match=r"cannot compile kernels \(Failed to find C compiler\.\)"):
        assert not layers.has_kernels(x)
    assert not layers.has_kernels(x)  # and it is said once
    layers._triton_works.cache_clear()


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "_compile_kernels.py")]
    subprocess.run(command, check=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
