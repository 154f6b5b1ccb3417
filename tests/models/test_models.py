"""Backbones: shapes, sizes, initialisation; transformers for text."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.methods import SORO
from spcl.models import (
    BACKBONES,
    MLP,
    Backbone,
    InputSpec,
    Ngrams,
    Normalise,
    ResNet18,
    ResNet34,
    SeriesCNN,
    SeriesGRU,
    SmallCNN,
    Standardise,
    TextTransformer,
    VisionTransformer,
)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def dense(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def convolution(inputs: int, outputs: int, size: int) -> int:
    return inputs * outputs * size * size


def test_parameter_counts() -> None:
    assert parameters(MLP(784)) == dense(784, 128) + dense(128, 64)
    assert parameters(MLP(10, hidden=(7,))) == dense(10, 7)
    cnn = convolution(3, 32, 3) + 32 + convolution(32, 64, 3) + 64 + convolution(64, 64, 3) + 64
    assert parameters(SmallCNN()) == cnn + dense(4 * 4 * 64, 64) == 121_920
    norm = 2
    stem = convolution(3, 64, 3) + norm * 64
    stages = 4 * (convolution(64, 64, 3) + norm * 64)
    for inputs, outputs in ((64, 128), (128, 256), (256, 512)):
        stages += convolution(inputs, outputs, 3) + 3 * convolution(outputs, outputs, 3) + 4 * norm * outputs
        stages += convolution(inputs, outputs, 1) + norm * outputs
    assert parameters(ResNet18()) == stem + stages == 11_168_832
    more = sum(n * 2 * (convolution(c, c, 3) + norm * c) for n, c in ((1, 64), (2, 128), (4, 256), (1, 512)))
    assert parameters(ResNet34()) == stem + stages + more
    block = 2 * norm * 192 + dense(192, 3 * 192) + dense(192, 192) + dense(192, 4 * 192) + dense(4 * 192, 192)
    assert parameters(VisionTransformer()) == dense(3 * 4 * 4, 192) + 64 * 192 + 6 * block + norm * 192


def test_a_narrow_network_has_every_layer_in_proportion() -> None:
    wide, narrow = ResNet18(), ResNet18(width=16)
    for (name, weight), (_, other) in zip(wide.named_parameters(), narrow.named_parameters(), strict=True):
        inputs = weight.shape[1:2] if "stem" not in name else ()
        assert other.shape[0] * 4 == weight.shape[0]
        assert [size // 4 for size in inputs] == list(other.shape[1:2])[: len(inputs)]
    assert narrow(torch.zeros(2, 3, 32, 32)).shape == (2, narrow.feature_dim) == (2, 128)
    with pytest.raises(SpclError, match="width of a residual network is 0; give at least 1"):
        ResNet18(width=0)


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(depth=1, width=8, heads=2)
    (block,) = model.blocks
    reference = nn.MultiheadAttention(8, 2, batch_first=True)
    reference.load_state_dict(
        {
            "in_proj_weight": block.queries_keys_values.weight,
            "in_proj_bias": block.queries_keys_values.bias,
            "out_proj.weight": block.projection.weight,
            "out_proj.bias": block.projection.bias,
        }
    )
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(block._attention(x), reference(x, x, x)[0])


def test_images_that_are_no_multiple_of_the_patch_are_refused() -> None:
    with pytest.raises(SpclError, match="images of 30×32 in patches of 4"):
        VisionTransformer(3, (30, 32))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (MLP(784), (1, 28, 28)),
        (MLP(12, hidden=(9, 8, 7)), (12,)),
        (SmallCNN(), (3, 32, 32)),
        (SmallCNN(channels=1, image_size=28), (1, 28, 28)),
        (SmallCNN(channels=2, image_size=18), (2, 18, 18)),
        (SmallCNN(channels=3, image_size=(32, 48)), (3, 32, 48)),
        (SmallCNN(channels=1, image_size=(25, 18)), (1, 25, 18)),
        (ResNet18(), (3, 32, 32)),
        (ResNet18(), (3, 32, 48)),
        (ResNet18(channels=1), (1, 7, 40)),
        (ResNet18(channels=1), (1, 28, 28)),
        (ResNet18(), (3, 64, 64)),
        (ResNet34(channels=1), (1, 28, 28)),
        (VisionTransformer(depth=2), (3, 32, 32)),
        (VisionTransformer(1, (28, 20), depth=1, width=32, heads=2), (1, 28, 20)),
        (SeriesCNN(3), (200, 3)),
        (SeriesCNN(5, width=7), (3, 5)),
        (SeriesCNN(2), (1, 2)),
        (SeriesGRU(3, width=9), (24, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_features_and_gradients(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    features = model(x)
    assert features.shape == (4, model.feature_dim)
    features.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    assert x.grad is not None
    assert x.grad.any()


def test_resnet_halves_the_maps_by_pool_and_strides() -> None:
    model = ResNet18()
    x = torch.zeros(1, 3, 32, 32)
    assert model.stem(x).shape == (1, 64, 16, 16)
    sizes = []
    for block in model.stages:
        block.register_forward_hook(lambda _, __, output: sizes.append(tuple(output.shape[1:])))
    model(x)
    expected = [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)]
    assert sizes == [size for size in expected for _ in range(2)]


def test_residual_block_with_zero_convolutions_is_its_shortcut() -> None:
    block = ResNet18().stages[0]
    for layer in block.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.zeros_(layer.weight)
    x = torch.randn(2, 64, 5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x.relu())


@pytest.mark.parametrize("momentum", [0.01, 0.1])
def test_batch_norm_momentum_reaches_every_layer(momentum: float) -> None:
    norms = [layer for layer in ResNet18(batch_norm_momentum=momentum).modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 20
    assert all(layer.momentum == momentum for layer in norms)


def test_weights_are_initialised_as_in_he_et_al() -> None:
    torch.manual_seed(0)
    for model in (MLP(784), SmallCNN(), ResNet18()):
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                fan_in = layer.weight[0].numel()
                tolerance = 5 / math.sqrt(
                    2 * layer.weight.numel()
                )  # five deviations of a standard deviation's estimate
                assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=tolerance)
                assert layer.bias is None or not layer.bias.any()


def test_weights_depend_on_the_global_seed() -> None:
    def build(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([parameter.flatten() for parameter in SmallCNN().parameters()])

    assert torch.equal(build(1), build(1))
    assert not torch.equal(build(1), build(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.int64])
def test_normalisation_is_exact(dtype: torch.dtype) -> None:
    values = torch.arange(256)
    x = torch.stack([values, values.flip(0)]).view(1, 2, 16, 16).to(dtype)
    mean, std = (0.5071, 0.4865), (0.2673, 0.2564)
    y = Normalise(mean, std)(x)
    assert y.dtype == torch.float32
    exact = (x.double() / 255 - torch.tensor(mean).double().view(2, 1, 1)) / torch.tensor(std).double().view(2, 1, 1)
    assert (y - exact).abs().max() < 1e-6
    reference = (x[0, 1].float() / 255 - torch.tensor(mean[1])) / torch.tensor(std[1])
    assert torch.equal(y[0, 1], reference)


def test_normalisation_of_whole_data_gives_mean_0_and_deviation_1() -> None:
    x = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scaled = x.double() / 255
    layer = Normalise(scaled.mean((0, 2, 3)).tolist(), scaled.std((0, 2, 3), correction=0).tolist())
    y = layer(x).double()
    assert torch.allclose(y.mean((0, 2, 3)), torch.zeros(3).double(), atol=1e-5)
    assert torch.allclose(y.std((0, 2, 3), correction=0), torch.ones(3).double(), atol=1e-5)


def test_normalisation_is_saved_but_not_trained() -> None:
    layer = Normalise((0.1, 0.2), (0.3, 0.4))
    assert list(layer.parameters()) == []
    other = Normalise((0.0, 0.0), (1.0, 1.0))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.mean, torch.tensor([0.1, 0.2]))
    assert torch.equal(other.std, torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize(("mean", "std"), [(0.5, 0.0), ((0.1, 0.2), (0.3,)), ((0.1, 0.2), (0.3, -0.1))])
def test_invalid_normalisation_is_refused(mean: float | tuple[float, ...], std: float | tuple[float, ...]) -> None:
    with pytest.raises(SpclError, match="every std positive"):
        Normalise(mean, std)


def test_backbone_has_the_features_of_its_last_module() -> None:
    backbone = Backbone(Normalise(0.5, 0.25), SmallCNN(channels=1, image_size=28))
    images = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert backbone.feature_dim == 64
    assert torch.equal(backbone(images), backbone[1]((images.float() / 255 - 0.5) / 0.25))


def test_too_small_images_are_refused() -> None:
    with pytest.raises(SpclError, match="images are 17×17, but the convolutions need at least 18×18"):
        SmallCNN(image_size=17)
    with pytest.raises(SpclError, match="images are 17×24, but the convolutions need at least 18×18"):
        SmallCNN(image_size=(17, 24))
    with pytest.raises(SpclError, match="images are 24×17, but the convolutions need at least 18×18"):
        SmallCNN(image_size=(24, 17))


def test_image_size_may_be_one_number() -> None:
    def build(size: int | tuple[int, int]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return SmallCNN(image_size=size).state_dict()

    torch.testing.assert_close(build(20), build((20, 20)), rtol=0, atol=0)


# -- text: the transformer sees the tokens, and nothing of the padding


@pytest.fixture
def text_model() -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(vocabulary=20, length=10, width=16, depth=2, heads=4).eval()


def tokens() -> Tensor:
    return torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(0))


def test_padding_does_not_change_the_features(text_model: TextTransformer) -> None:
    padded = torch.cat([tokens(), torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(text_model(padded), text_model(tokens()))


def test_a_mask_replaces_the_padding_token(text_model: TextTransformer) -> None:
    noise = torch.cat([tokens(), torch.full((3, 4), 7)], dim=1)
    mask = (torch.arange(10) < 6).long().expand(3, 10)
    torch.testing.assert_close(text_model({"input_ids": noise, "attention_mask": mask}), text_model(tokens()))
    assert torch.equal(text_model({"input_ids": tokens()}), text_model(tokens()))


def test_the_order_of_tokens_matters(text_model: TextTransformer) -> None:
    assert not torch.allclose(text_model(tokens()), text_model(tokens().flip(1)))


def test_unknown_tokens_and_empty_texts_have_features(text_model: TextTransformer) -> None:
    assert torch.equal(text_model(torch.tensor([[20, 3]])), text_model(torch.tensor([[999, 3]])))
    assert torch.isfinite(text_model(torch.zeros(1, 5, dtype=torch.int64))).all()


def test_texts_that_are_too_long_are_refused(text_model: TextTransformer) -> None:
    with pytest.raises(SpclError, match="texts have 11 tokens, but the model takes at most 10"):
        text_model(torch.ones(1, 11, dtype=torch.int64))
    with pytest.raises(SpclError, match="the width a multiple of the heads"):
        TextTransformer(20, 10, width=10, heads=4)


# -- real sources: standardised features, series, short texts


def test_standardised_features_have_mean_0_and_deviation_1() -> None:
    x = torch.randn(300, 7, 3) * torch.tensor([1.0, 500.0, 0.0]) + torch.tensor([0.0, 1e4, 3.0])
    layer = Standardise(3)
    assert torch.equal(layer(x), x)
    layer.fit(x)
    y = layer(x).flatten(0, 1)
    torch.testing.assert_close(y.mean(dim=0), torch.zeros(3), atol=1e-2, rtol=0)
    torch.testing.assert_close(y.std(dim=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-2, rtol=0)
    copy = Standardise(3)
    copy.load_state_dict(layer.state_dict())
    assert torch.equal(copy(x), layer(x))
    for wrong in (x[:, :, :2], x[:1, :1]):
        with pytest.raises(SpclError, match="give at least two samples of the network's inputs"):
            layer.fit(wrong)


def test_words_in_another_order_are_other_pairs_and_padding_is_nothing() -> None:
    model = Ngrams()
    texts = torch.tensor([[5, 6, 7, 0], [7, 6, 5, 0], [0, 0, 0, 0]])
    features = model(texts)
    assert not torch.allclose(features[0], features[1])
    assert torch.equal(features[2], torch.zeros(128))
    torch.testing.assert_close(model(texts[:2, :3]), features[:2])
    torch.testing.assert_close(model({"input_ids": texts.int()}), features)


TOKENS, SERIES = torch.randint(1, 99, (8, 5)), torch.randn(8, 12, 3)


@pytest.mark.parametrize(
    ("backbone", "x", "reason"),
    [
        ("conv1d", SERIES, None),
        ("ngrams", TOKENS, None),
        ({"name": "mlp", "standardise": True}, SERIES, None),
        ("gru", SERIES, "the parameter '1.gru.weight_ih_l0' is used by gru"),
    ],
    ids=["conv1d", "ngrams", "mlp", "gru"],
)
def test_which_networks_of_real_sources_share_a_pass(backbone: Any, x: Tensor, reason: str | None) -> None:
    learner = Learner(BACKBONES.make(backbone, InputSpec.of(x)), SORO())
    for name in "ab":
        learner.add_task(name, classes=2)
    learner.step({name: (x, torch.arange(8) % 2) for name in "ab"})
    assert learner.fallback_reason == reason


@pytest.mark.parametrize(
    ("name", "x"),
    [("conv1d", TOKENS), ("conv1d", torch.rand(8, 3)), ("gru", torch.rand(8, 3, 4, 4)), ("ngrams", SERIES)],
)
def test_networks_of_real_sources_refuse_other_samples(name: str, x: Tensor) -> None:
    with pytest.raises(SpclError, match=f"backbone '{name}' needs .*, but the samples are"):
        BACKBONES.make(name, InputSpec.of(x))
