"""A small convolutional network, the backbone of toy-cifar10."""

from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.models.backbone import BACKBONES, Initialisation, InputSpec, image_shape, initialise


class SmallCNN(nn.Module):
    """Three 3×3 convolutions (32, 64, 64 filters, no padding) with 2×2 max-pooling between, and a linear layer of 64.

    Args:
        channels: Channels of the images: 3 for colour, 1 for grey.
        image_size: Height and width of the images, or one number for both.
        init: Initialisation of the weights.

    >>> import torch
    >>> model = SmallCNN(channels=3, image_size=32)
    >>> model(torch.zeros(5, 3, 32, 32)).shape, model.feature_dim
    (torch.Size([5, 64]), 64)
    """

    feature_dim = 64

    def __init__(self, channels: int = 3, image_size: int | tuple[int, int] = 32, init: Initialisation = "he") -> None:
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        rows, columns = (((side - 2) // 2 - 2) // 2 - 2 for side in (height, width))
        if min(rows, columns) < 1:
            raise SpclError(f"images are {height}×{width}, but the convolutions need at least 18×18; use an MLP")
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
        )
        self.dense = nn.Sequential(nn.Flatten(), nn.Linear(64 * rows * columns, self.feature_dim), nn.ReLU())
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        features: Tensor = self.dense(self.convolutions(x))
        return features


@BACKBONES.register("cnn")
def cnn(inputs: InputSpec, init: Initialisation = "he") -> nn.Module:
    """Three convolutions and a linear layer; the network of Toy-CIFAR-10."""
    channels, *size = image_shape("cnn", inputs)
    return SmallCNN(channels, (size[0], size[1]), init)
