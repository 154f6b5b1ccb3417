"""Custom data and a custom backbone, in ten lines.

    python examples/own_data.py

Two tasks are learnt in parallel, each from its own loader. The second ends early; a small memory replays its samples.
Replace `x` and `labels` by your data, and the loaders by any iterables of batches (inputs, labels).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spcl

torch.manual_seed(0)
x = torch.randn(6000, 2)
labels = {
    "direction": (torch.atan2(x[:, 1], x[:, 0]) / torch.pi * 2 + 2).long().clamp(0, 3),  # quadrant
    "distance": torch.bucketize(x.norm(dim=1), torch.tensor([1.0, 2.0])),  # near, middle or far
}
seen = {"direction": x[:5000], "distance": x[:2500]}

backbone = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
learner = spcl.Learner(backbone, spcl.SORO(), memory=spcl.Reservoir(500))
data = {name: TensorDataset(inputs, labels[name][: len(inputs)]) for name, inputs in seen.items()}
for moment in spcl.LiveStream({name: DataLoader(pairs, batch_size=32, shuffle=True) for name, pairs in data.items()}):
    for name in moment.started:
        learner.add_task(name, classes=int(labels[name].max()) + 1)
    if moment.batches:
        learner.step(moment.batches)
for name, y in labels.items():
    print(f"{name}: {(learner.predict(x[5000:], task=name) == y[5000:]).float().mean():.1%} accuracy on new points")
