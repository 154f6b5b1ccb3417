"""What a gradient takes at the least: arithmetic, numbers, operations; forward, loss and backward of 128 samples.

python benchmarks/floor.py
"""

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from spcl.models import MLP, ResNet18

BATCH, CLASSES = 128, 10
PASSES_OVER_ACTIVATIONS = {"native_batch_norm", "native_batch_norm_backward", "relu", "threshold_backward", "add"}


class Operations(TorchDispatchMode):
    """Notes every operation that returns new numbers, not just another view of old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        result = operation(*arguments, **(options or {}))
        if not getattr(operation, "is_view", False):
            self.names.append(str(operation).split(".")[1].strip("_"))
        return result


def count_activations(net: nn.Module, x: Tensor) -> int:
    found = 0

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal found
        found += output.numel()

    for layer in net.modules():
        if not list(layer.children()):
            layer.register_forward_hook(note)
    net(x)
    return found


def gradient(net: nn.Module, head: nn.Module, x: Tensor) -> None:
    cross_entropy(head(net(x)), torch.zeros(len(x), dtype=torch.int64)).backward()


def main() -> None:
    table = Table(title=f"A gradient of {BATCH} samples: forward, loss, backward", title_justify="left")
    headings = ("", "parameters", "GFLOP", "activations", "operations", "of them batch-norm, ReLU or additions")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for name, net, shape in (("ResNet-18", ResNet18(), (3, 32, 32)), ("MLP 784–128–64", MLP(784), (1, 28, 28))):
        x, head = torch.randn(BATCH, *shape), nn.Linear(net.feature_dim, CLASSES)
        with FlopCounterMode(display=False) as flops, Operations() as operations:
            gradient(net, head, x)
        passes = sum(found in PASSES_OVER_ACTIVATIONS for found in operations.names)
        parameters = sum(parameter.numel() for parameter in net.parameters())
        activations = f"{count_activations(net, x) / 1e6:.1f} M"
        gigaflop = f"{flops.get_total_flops() / 1e9:.2f}"
        table.add_row(name, f"{parameters:,}", gigaflop, activations, str(len(operations.names)), str(passes))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
