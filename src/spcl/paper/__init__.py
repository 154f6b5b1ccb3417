"""Everything that exists only to compare with one paper, added as a plug-in like anybody else's.

The paper is Li et al., *Towards Stable Training of Parallel Continual Learning* (2024): the presets ``paper`` and
``released``, the format of its authors' protocol files, the numbers of its tables, and its figures. Figures are loaded
when one is asked for.
"""

from spcl.paper import numbers, presets, protocols

__all__ = ["numbers", "presets", "protocols"]
