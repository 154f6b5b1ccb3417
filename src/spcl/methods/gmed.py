"""GMED, gradient-based memory editing."""

from pydantic import Field

from spcl.methods.er import ER
from spcl.methods.replay import EditOptions, ReplayLossName
from spcl.methods.settings import MethodSettings


class GMEDSettings(EditOptions, MethodSettings):
    """Settings of :class:`GMED`; the defaults are the ones in its authors' code."""

    replay_loss: ReplayLossName = Field("edited", description="loss on replayed samples")


class GMED(ER):
    r"""Gradient-based memory editing: ER whose replayed samples are first moved to where their loss is about to rise.

    .. math:: x \leftarrow x + \gamma^k \alpha s^2\, \nabla_x \left[\ell(x; \theta') - \ell(x; \theta)
        - \beta\, \ell(x; \theta)\right], \qquad \theta' = \theta - \eta g

    for a sample that was edited k times before. The look-ahead :math:`\theta'` is a step of the shared parameters down
    the current tasks' mean gradient; its rate is a setting, since the optimiser's own step is not known in advance. The
    variance :math:`s^2` of the drawn inputs, for every shape and type by itself, makes the stride α independent of
    their units. Edits are written back to memory, so it must keep inputs in floating point, e.g.
    ``BalancedCoreset(3000, dtype=torch.float32)``; inputs that are dicts, tuples or integers other than bytes are an
    error.

    Jin et al., *Gradient-based Editing of Memory Examples for Online Task-free Continual Learning*, NeurIPS 2021, eq. 2
    and 3.

    >>> GMED(decay=0.99)
    GMED(decay=0.99)
    """

    name = "gmed"
    family = "SCL"
    order = 2
    summary = "ER on samples that are edited towards a loss that is about to rise"
    reference = "Jin et al., Gradient-based Editing of Memory Examples, NeurIPS 2021"
    Settings = GMEDSettings
    settings: GMEDSettings
