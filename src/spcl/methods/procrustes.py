"""Procrustes: orthogonal gradients of equal norm, where SORO's descent starts."""

from pydantic import Field

from spcl.methods.soro import SORO, SOROMethodSettings


class Procrustes(SORO):
    r"""SORO without its descent: the orthogonal gradients nearest to G, times its smallest singular value, added up.

    .. math:: u = \sigma_{min}(G)\, U V^\top \mathbf 1, \qquad G = U S V^\top

    This is what SORO starts at and, with the paper's σ = λ = 100, all but stays at: in training its update differs from
    this one by a few thousandths (median 0.2 % on PS-Glyphs, ``python benchmarks/soro_limit.py``). It is also the
    update of Aligned-MTL (``torchjd:AlignedMTL``) but for a factor 1/T. With ``scale="unit"`` the factor σ_min is 1.

    Senushkin et al., *Independent Component Alignment for Multi-Task Learning*, CVPR 2023.

    >>> Procrustes().settings.iterations
    0
    """

    name = "procrustes"
    summary = "the nearest orthogonal gradients of equal norm, where SORO's descent starts"
    reference = "Senushkin et al., Independent Component Alignment for Multi-Task Learning, CVPR 2023"

    class Settings(SOROMethodSettings):
        """Settings of :class:`Procrustes`: the settings of :class:`SORO` without iterations."""

        iterations: int = Field(0, ge=0, le=0, description="N, number of iterations: none")
