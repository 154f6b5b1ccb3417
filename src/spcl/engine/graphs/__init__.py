"""Engine that captures the work of a step as CUDA graphs. Internal: may change without notice."""

from spcl.engine.graphs.engine import CudaGraphEngine

__all__ = ["CudaGraphEngine"]
