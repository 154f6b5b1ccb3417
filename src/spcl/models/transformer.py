"""The blocks of transformers, and their initialisation."""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["TransformerBlock", "initialise_transformer"]


class TransformerBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + perceptron(norm(x)).

    >>> import torch
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
