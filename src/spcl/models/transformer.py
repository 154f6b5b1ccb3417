"""Small transformers for images and for token sequences, their blocks and initialisation."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from spcl.errors import SpclError
from spcl.models.backbone import BACKBONES, InputSpec, image_shape


class TransformerBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + perceptron(norm(x)).

    >>> TransformerBlock(width=8, heads=2)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the tokens after the block; `mask` (samples × tokens) is false for tokens that are not attended to."""
        x = x + self._attention(self.attention_norm(x), mask)
        transformed: Tensor = self.perceptron(x)
        return x + transformed

    def _attention(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        samples, tokens, width = x.shape
        shape = (samples, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = self.queries_keys_values(x).view(shape).permute(2, 0, 3, 1, 4)
        attended_to = None if mask is None else mask[:, None, None, :]
        attended = scaled_dot_product_attention(queries, keys, values, attended_to).transpose(1, 2)
        projected: Tensor = self.projection(attended.reshape(samples, tokens, width))
        return projected


def initialise_transformer(module: nn.Module) -> None:
    """Draw the weights of all linear layers from a normal distribution of σ = 0.02, cut off at ±2, and zero the biases.

    >>> layer = nn.Linear(1000, 100)
    >>> initialise_transformer(layer)
    >>> round(layer.weight.std().item(), 2), layer.bias.abs().max().item()
    (0.02, 0.0)
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)


class VisionTransformer(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021) for small images: pre-norm blocks over patches, mean-pooled.

    Args:
        channels: channels of the images.
        image_size: height and width, or one number for both; multiples of ``patch``.
        patch: side of a patch.
        width: length of a token, and of the features.
        depth: number of blocks.
        heads: attention heads of a block.

    >>> model = VisionTransformer()
    >>> model(torch.zeros(2, 3, 32, 32)).shape, model.feature_dim
    (torch.Size([2, 192]), 192)
    """

    def __init__(
        self,
        channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        *,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
    ) -> None:
        super().__init__()
        height, breadth = (image_size, image_size) if isinstance(image_size, int) else image_size
        if height % patch or breadth % patch or width % heads:
            raise SpclError(
                f"images of {height}×{breadth} in patches of {patch}, tokens of {width} in {heads} heads: "
                f"the sides must be multiples of the patch, the width one of the heads"
            )
        self.feature_dim = width
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (height // patch) * (breadth // patch), width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.trunc_normal_(self.positions, std=0.02)
        initialise_transformer(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images: the mean over tokens."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        features: Tensor = self.norm(self.blocks(tokens)).mean(dim=1)
        return features


class TextTransformer(nn.Module):
    """A transformer encoder over tokens: pre-norm blocks, and the mean over the tokens that are not padding.

    It takes integer tokens N×L, where 0 is padding, or a dict of ``input_ids`` and perhaps ``attention_mask``, which is
    0 at padding. Tokens beyond the vocabulary count as one unknown token.

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


@BACKBONES.register("vit")
def vit(inputs: InputSpec, patch: int = 4, width: int = 192, depth: int = 6, heads: int = 3) -> nn.Module:
    """Vision transformer for small images."""
    channels, *size = image_shape("vit", inputs)
    return VisionTransformer(channels, (size[0], size[1]), patch=patch, width=width, depth=depth, heads=heads)


@BACKBONES.register("text")
def text(inputs: InputSpec, width: int = 64, depth: int = 2, heads: int = 4) -> nn.Module:
    """Transformer for token sequences, or for ``input_ids`` with an ``attention_mask``."""
    tokens = inputs if inputs.parts is None else inputs.parts.get("input_ids", inputs)
    if tokens.vocabulary is None or len(tokens.shape) != 1:
        raise SpclError(f"backbone 'text' needs token sequences of integers, but the samples are {inputs}")
    return TextTransformer(tokens.vocabulary, tokens.shape[0], width=width, depth=depth, heads=heads)
