"""Networks for series, samples of time × channels: convolutions, and a recurrent network."""

from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.models.backbone import BACKBONES, Initialisation, InputSpec, initialise, standardised

PLACES = 8


class SeriesCNN(nn.Module):
    """Three convolutions over time (32, 64, 64 filters), two poolings by 2, the means of 8 parts, and a linear layer.

    The series may have any length. One pass serves several sources.

    Args:
        channels: Numbers of a time step.
        width: Number of features.
        init: Initialisation of the weights.

    >>> import torch
    >>> model = SeriesCNN(channels=3)
    >>> model(torch.zeros(5, 200, 3)).shape, model.feature_dim
    (torch.Size([5, 64]), 64)
    """

    def __init__(self, channels: int, width: int = 64, init: Initialisation = "he") -> None:
        super().__init__()
        self.feature_dim = width
        self.convolutions = nn.Sequential(
            nn.Conv1d(channels, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2, ceil_mode=True),
            nn.Conv1d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2, ceil_mode=True),
            nn.Conv1d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(PLACES),
        )
        self.dense = nn.Sequential(nn.Flatten(), nn.Linear(64 * PLACES, width), nn.ReLU())
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of series, samples × time × channels."""
        features: Tensor = self.dense(self.convolutions(x.transpose(1, 2)))
        return features


class SeriesGRU(nn.Module):
    """A gated recurrent unit (Cho et al., 2014), and its state after the last time step.

    Every source takes a pass of its own: PyTorch computes all steps of time in one function.

    Args:
        channels: Numbers of a time step.
        width: Length of the state, the number of features.

    >>> import torch
    >>> model = SeriesGRU(channels=3)
    >>> model(torch.zeros(5, 24, 3)).shape, model.feature_dim
    (torch.Size([5, 64]), 64)
    """

    def __init__(self, channels: int, width: int = 64) -> None:
        super().__init__()
        self.feature_dim = width
        self.gru = nn.GRU(channels, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of series, samples × time × channels."""
        _, state = self.gru(x)
        features: Tensor = state[0]
        return features


@BACKBONES.register("conv1d")
def conv1d(inputs: InputSpec, width: int = 64, init: Initialisation = "he", standardise: bool = True) -> nn.Module:
    """Three convolutions over time and a linear layer, for series of time × channels."""
    network = SeriesCNN(_series_channels("conv1d", inputs), width, init)
    return standardised(inputs, network) if standardise else network


@BACKBONES.register("gru")
def gru(inputs: InputSpec, width: int = 64, standardise: bool = True) -> nn.Module:
    """Gated recurrent unit, for series of time × channels; every source takes a pass of its own."""
    network = SeriesGRU(_series_channels("gru", inputs), width)
    return standardised(inputs, network) if standardise else network


def _series_channels(name: str, inputs: InputSpec) -> int:
    if len(inputs.shape) != 2 or inputs.parts is not None or not inputs.dtype.is_floating_point:
        raise SpclError(f"backbone {name!r} needs series of numbers, time × channels, but the samples are {inputs}")
    return inputs.shape[1]
