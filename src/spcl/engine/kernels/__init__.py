"""Triton kernels for passes over several batches of images side by side, on a GPU."""
