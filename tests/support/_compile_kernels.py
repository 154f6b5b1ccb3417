"""Compile every Triton kernel for a Hopper GPU, which need not be there: python _compile_kernels.py

It runs in a process of its own, since the tests interpret the kernels.
"""

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spcl.engine.kernels import batch_norm, convolution

NUMBERS = (
    "weight bias means scales deviations mean_out scale_out variance_out variances running_mean running_variance "
    "bias_sums weight_sums bias_out weight_out parts"
)
TYPES = dict.fromkeys(("x", "y", "addend", "gradient", "masked", "out"), "*bf16")
TYPES |= dict.fromkeys(NUMBERS.split(), "*fp32")
TYPES |= dict.fromkeys(("table", "first", "counts"), "*i32")
TYPES |= dict.fromkeys(("eps", "momentum"), "fp32") | dict.fromkeys(("width_factor", "by_h", "by_w"), "i64")
OF_RESULTS, OF_GRADIENTS = {"weight": "*bf16"}, {"rows": "*i64", "out": "*fp32"}

IMAGES = {"ROWS": 32, "CHANNELS": 64}
CHUNKS = {"CHUNKS": 128, "CHANNELS": 16}
FLAT = {"ROWS": 64, "COLUMNS": 32, "FILTERS": 64, "IS_FLAT": True, "IS_WHOLE": False}
WIDE = {"ROWS": 64, "COLUMNS": 128, "FILTERS": 128, "IS_FLAT": False, "IS_WHOLE": True}
KERNELS: list[tuple[Any, Mapping[str, object], Mapping[str, str]]] = [
    (batch_norm.chunk_statistics, IMAGES, {}),
    (batch_norm.batch_statistics, CHUNKS, {}),
    (batch_norm.running_averages, {"BATCHES": 4, "CHANNELS": 32}, {}),
    (batch_norm.normalise, IMAGES | {"ADD": True, "RELU": True}, {}),
    *((batch_norm.chunk_sums, IMAGES | {"ADD": add, "RELU": True}, {}) for add in (False, True)),
    (batch_norm.batch_sums, CHUNKS, {}),
    (batch_norm.input_gradient, IMAGES | {"RELU": True}, {}),
    (batch_norm.normalise_and_pool, IMAGES, {}),
    (batch_norm.pooled_sums, IMAGES, {}),
    (batch_norm.pooled_input_gradient, IMAGES, {}),
    (convolution._convolve, {"ROWS": 128, "COLUMNS": 32, "FILTERS": 64}, OF_RESULTS),
    (convolution._weight_gradients, FLAT, OF_GRADIENTS),
    (convolution._weight_gradients, WIDE, OF_GRADIENTS),
    (convolution._sum_chunks, {"CHUNKS": 16, "NUMBERS": 128}, OF_GRADIENTS),
]


def compile_kernel(kernel: Any, constants: Mapping[str, object], types: Mapping[str, str]) -> None:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else {**TYPES, **types}.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, constants, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    for each in KERNELS:
        compile_kernel(*each)
