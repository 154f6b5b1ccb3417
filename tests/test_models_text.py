"""The text transformer sees the tokens of a text, and nothing of its padding."""

import pytest
import torch
from torch import Tensor

from spcl.errors import SpclError
from spcl.models import TextTransformer


@pytest.fixture
def model() -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(vocabulary=20, length=10, width=16, depth=2, heads=4).eval()


def tokens() -> Tensor:
    return torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(0))


def test_padding_does_not_change_the_features(model: TextTransformer) -> None:
    padded = torch.cat([tokens(), torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(padded), model(tokens()))


def test_a_mask_replaces_the_padding_token(model: TextTransformer) -> None:
    noise = torch.cat([tokens(), torch.full((3, 4), 7)], dim=1)
    mask = (torch.arange(10) < 6).long().expand(3, 10)
    torch.testing.assert_close(model({"input_ids": noise, "attention_mask": mask}), model(tokens()))
    assert torch.equal(model({"input_ids": tokens()}), model(tokens()))


def test_the_order_of_tokens_matters(model: TextTransformer) -> None:
    assert not torch.allclose(model(tokens()), model(tokens().flip(1)))


def test_unknown_tokens_and_empty_texts_have_features(model: TextTransformer) -> None:
    assert torch.equal(model(torch.tensor([[20, 3]])), model(torch.tensor([[999, 3]])))
    assert torch.isfinite(model(torch.zeros(1, 5, dtype=torch.int64))).all()


def test_texts_that_are_too_long_are_refused(model: TextTransformer) -> None:
    with pytest.raises(SpclError, match="texts have 11 tokens, but the model takes at most 10"):
        model(torch.ones(1, 11, dtype=torch.int64))
    with pytest.raises(SpclError, match="the width a multiple of the heads"):
        TextTransformer(20, 10, width=10, heads=4)
