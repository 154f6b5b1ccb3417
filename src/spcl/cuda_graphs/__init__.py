"""The engine that captures the work of a step in CUDA graphs and replays them."""

from spcl.cuda_graphs.engine import CudaGraphEngine

__all__ = ["CudaGraphEngine"]
