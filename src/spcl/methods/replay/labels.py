"""Replay towards labels."""

from spcl.methods.replay.base import ReplayLoss

__all__ = ["Labels"]


class Labels(ReplayLoss):
    r"""Samples are trained towards their labels, by the losses of their tasks:
    :math:`\ell_m = \mathbb E\left[\ell(h(x), y)\right]`.
    """
