"""Engine that captures the work of a step as CUDA graphs. Internal: may change without notice."""

from spcl.cuda_graphs.engine import CudaGraphEngine

__all__ = ["CudaGraphEngine"]
