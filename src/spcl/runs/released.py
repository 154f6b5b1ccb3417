"""Preset ``released``: the networks and habits of the code that the paper's authors published."""

from collections.abc import Mapping
from typing import Any

from spcl.aggregation.soro_settings import RELEASED
from spcl.registry import Named, named_options

__all__ = ["released_settings"]

BACKBONES: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"init": "glorot"},
    "cnn": {"init": "glorot"},
    "resnet18": {"norm_eps": 1e-3, "stem_init": "glorot", "residual_relu": True},
}
"""Options of the published networks: TensorFlow's defaults, and a ReLU more in every block."""

METHODS: Mapping[str, Mapping[str, Any]] = {
    "soro": RELEASED,
    "soro+dbt": RELEASED,
    **{name: {"cutoff": RELEASED["cutoff"]} for name in ("procrustes", "soro-kappa", "normsum", "scaledsum")},
    "maxdo": {"variant": "descent"},
}
"""Settings of methods in the published code, and its eigenvalue cut-off for those that are compared with SORO."""


def released_settings(backbone: Named, method: str) -> dict[str, Any]:
    """Return what the preset sets beyond that of the benchmark, for a backbone and a method.

    Each of these is a setting of its own, so that one change at a time can be studied.

    >>> released_settings("mlp", "er")["backbone"]
    {'name': 'mlp', 'init': 'glorot'}
    """
    name, _ = named_options(backbone, "backbone")
    return {
        "normalise": False,
        "optimizer": {"name": "adam", "eps": 1e-7},
        "memory": "epochs",
        "backbone": {"name": name, **BACKBONES.get(name, {})},
        "method": {"name": method, "weigh_heads": True, "head_init": "glorot", **METHODS.get(method, {})},
    }
