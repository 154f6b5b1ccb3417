"""People who wear a watch or a phone come, go and return: one question, inputs of two shapes, one network.

    python examples/wearables.py

Everybody is a source of the same task. A watch has 6 channels, a phone 9, so each kind has an encoder, which all its
wearers share; in front of it everybody has a scale and shift of their own.
"""

import torch
from torch import Tensor, nn

import spcl
from spcl.encoders import Affine

ACTIVITIES = ["sitting", "walking", "running", "climbing"]
CHANNELS = {"watch": 6, "phone": 9}
PEOPLE = {"anna": "watch", "ben": "phone", "carla": "watch", "dora": "watch"}  # dora is never trained
DAYS = {"anna": [(0, 150), (280, 360)], "ben": [(50, 250)], "carla": [(120, 320)]}  # when each is there, by step

torch.manual_seed(0)
motions = 1.5 * torch.randn(len(ACTIVITIES), 8)
devices = {device: torch.randn(8, channels) / 2 for device, channels in CHANNELS.items()}
habits = {name: (1.0 + 0.3 * torch.randn(8), 0.8 * torch.randn(8)) for name in PEOPLE}  # everybody moves differently


def record(name: str, count: int = 32) -> tuple[Tensor, Tensor]:
    y = torch.randint(len(ACTIVITIES), (count,))
    scale, shift = habits[name]
    return (scale * motions[y] + shift + 0.7 * torch.randn(count, 8)) @ devices[PEOPLE[name]], y


encoders = {device: nn.Sequential(nn.Linear(channels, 16), nn.ReLU()) for device, channels in CHANNELS.items()}
trunk = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
learner = spcl.Learner(trunk, spcl.SPCL(), memory=spcl.Reservoir(300), scenario="domain")
learner.add_task("activity", classes=ACTIVITIES)

for step in range(360):
    for name, visits in DAYS.items():
        if any(step == first for first, _ in visits):
            own = nn.Sequential(Affine(CHANNELS[PEOPLE[name]]), encoders[PEOPLE[name]])
            learner.add_source(name, *([] if name in learner.sources else ["activity", own]))  # or she returns
            print(f"step {step:3}: {name} puts on a {PEOPLE[name]}")
    learner.step({name: record(name) for name in learner.active_sources})
    for name, visits in DAYS.items():
        if any(step + 1 == last for _, last in visits):
            learner.finish_source(name)
            print(f"step {step:3}: {name} leaves with {learner.evaluate([record(name, 1000)], source=name):.0%}")

for name, device in PEOPLE.items():
    who = {"source": name} if name in learner.sources else {"encoder": encoders[device]}
    print(f"{name:5} ({device}{'' if name in learner.sources else ', never seen'}): "
          f"{learner.evaluate([record(name, 1000)], **who):.0%}")  # fmt: skip
