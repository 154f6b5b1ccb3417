"""A small vision transformer."""

import torch
from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.models.transformer import TransformerBlock, initialise_transformer

__all__ = ["VisionTransformer"]


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
