"""A method of your own: one class, which says how the gradients of the tasks are weighted.

    python examples/own_method.py

The file is a plug-in, too, so that the command can use it by name:

    spcl run --plugin examples/own_method.py --method balanced --set method.power=0.9 --out runs/balanced

`Balanced` weights each gradient by the inverse of its norm to some power, so that no task dominates the update. It sees
the T×T Gramian of the gradients only, at a cost that does not depend on the size of the model. Its settings are
checked, and it is saved with the learner.
"""

import torch
from pydantic import Field
from torch import nn

import spcl
from spcl.methods import ER, Gradients, Method, MethodSettings, Weights
from spcl.testing import check_method


class BalancedSettings(MethodSettings):
    power: float = Field(1.0, ge=0.0, le=1.0, description="1 gives all gradients the same norm, 0 changes nothing")


class Balanced(Method):
    name = "balanced"
    family = "MTL"
    summary = "gradients of more equal norms"
    reference = "an example"
    Settings = BalancedSettings
    settings: BalancedSettings

    def weigh(self, gradients: Gradients) -> Weights:
        norms = gradients.known_gramian().diagonal().clamp(min=1e-12).sqrt()
        return Weights((norms.mean() / norms) ** self.settings.power / len(norms))


def train(method: Method) -> spcl.Learner:
    torch.manual_seed(0)
    learner = spcl.Learner(nn.Sequential(nn.Linear(2, 32), nn.ReLU()), method, memory=spcl.Reservoir(100))
    learner.add_task("side", classes=2)
    learner.add_task("height", head=nn.Linear(32, 1), loss=nn.functional.mse_loss)
    for _ in range(200):
        x = torch.randn(32, 2)
        learner.step({"side": (x, (x[:, 0] > 0).long()), "height": (x, 100 * x[:, 1:])})  # of a much larger scale
    return learner


if __name__ == "__main__":
    check_method(Balanced, scaling=0)  # scaling all gradients leaves the weights as they are
    x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1))
    for method in (ER(), Balanced(power=0.9)):
        accuracy = train(method).evaluate([(x, (x[:, 0] > 0).long())], task="side")
        print(f"{method}: {accuracy:.1%} accuracy on the task with small gradients")
