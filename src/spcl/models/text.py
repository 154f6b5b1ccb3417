"""A small transformer for token sequences."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.models.transformer import TransformerBlock, initialise_transformer

__all__ = ["TextTransformer"]


class TextTransformer(nn.Module):
    """A transformer encoder over tokens: pre-norm blocks, and the mean over the tokens that are no padding.

    It takes integer tokens N×L, of which 0 is padding, or a dict of ``input_ids`` and perhaps ``attention_mask``, which
    is 0 where there is padding. Tokens beyond the vocabulary count as one unknown token.

    Args:
        vocabulary: number of tokens; they are 0..vocabulary-1.
        length: largest number of tokens of a text.
        width: length of an embedded token, and of the features.
        depth: number of blocks.
        heads: attention heads of a block.

    >>> model = TextTransformer(vocabulary=100, length=16)
    >>> model(torch.tensor([[7, 99, 3, 0], [5, 0, 0, 0]])).shape, model.feature_dim
    (torch.Size([2, 64]), 64)
    """

    def __init__(self, vocabulary: int, length: int, *, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        if vocabulary < 1 or length < 1 or width % heads:
            raise SpclError(
                f"a vocabulary of {vocabulary}, texts of {length} tokens, a width of {width} in {heads} heads: "
                f"give a vocabulary and a length of at least 1, and the width a multiple of the heads"
            )
        self.feature_dim = width
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, width)
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)
        initialise_transformer(self)

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return the features of a batch of texts."""
        tokens = x if isinstance(x, Tensor) else x["input_ids"]
        given = None if isinstance(x, Tensor) else x.get("attention_mask")
        mask = tokens != 0 if given is None else given != 0
        mask = mask | ~mask.any(dim=1, keepdim=True)  # an empty text attends to its padding, not to nothing
        if tokens.shape[1] > self.positions.shape[1]:
            raise SpclError(
                f"texts have {tokens.shape[1]} tokens, but the model takes at most {self.positions.shape[1]}; cut them"
            )
        hidden = self.embedding(tokens.clamp(max=self.vocabulary)) + self.positions[:, : tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, mask)
        weights = mask.unsqueeze(2).to(hidden.dtype)
        features: Tensor = (self.norm(hidden) * weights).sum(dim=1) / weights.sum(dim=1)
        return features
