"""The figures of the paper: each module defines one as ``FIGURE``."""
