"""Words and pairs of words of a text, hashed: a small network for short texts."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from spcl.errors import SpclError
from spcl.models.backbone import BACKBONES, InputSpec

PRIME = 7919


class Ngrams(nn.Module):
    """ReLU of the sum of a vector for every word and every pair of neighbours, over the square root of their number.

    Words and pairs share one table, in which each has a row by its number modulo the rows. It takes integer tokens N×L,
    where 0 is padding, or a dict of ``input_ids``; tokens need not be known beforehand. One pass serves several
    sources.

    Args:
        rows: Rows of the table.
        width: Length of a vector, the number of features.

    >>> model = Ngrams(rows=100)
    >>> model(torch.tensor([[7, 12345, 3, 0], [5, 0, 0, 0]])).shape, model.feature_dim
    (torch.Size([2, 128]), 128)
    """

    def __init__(self, rows: int = 8192, width: int = 128) -> None:
        super().__init__()
        self.feature_dim = width
        self.table = nn.Embedding(rows, width)
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return the features of a batch of texts."""
        tokens = (x if isinstance(x, Tensor) else x["input_ids"]).long()
        first, second = tokens[:, :-1], tokens[:, 1:]
        numbers = torch.cat([tokens, first * PRIME + second], dim=1) % self.table.num_embeddings
        shown = torch.cat([tokens != 0, second != 0], dim=1).unsqueeze(2)
        vectors = self.table(numbers) * shown
        return relu(vectors.sum(dim=1) / shown.sum(dim=1).clamp(min=1).sqrt())


@BACKBONES.register("ngrams")
def ngrams(inputs: InputSpec, rows: int = 8192, width: int = 128) -> nn.Module:
    """Hashed words and pairs of words, for short texts as token sequences; the network of CLINC150."""
    tokens = inputs if inputs.parts is None else inputs.parts.get("input_ids", inputs)
    if tokens.vocabulary is None or len(tokens.shape) != 1:
        raise SpclError(f"backbone 'ngrams' needs token sequences of integers, but the samples are {inputs}")
    return Ngrams(rows, width)
