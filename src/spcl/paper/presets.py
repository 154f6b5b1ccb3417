"""Presets ``paper`` and ``released``: the paper's settings, and all that its authors' published code does."""

from collections.abc import Mapping
from typing import Any

from spcl._util.registry import named_options
from spcl.aggregation.soro import RELEASED
from spcl.plugins import preset

PAPER = {"batch_norm_momentum": 0.01}
"""Batch-norm's momentum as published, where it is 0.99 in TensorFlow's convention."""

BACKBONES: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"init": "glorot"},
    "cnn": {"init": "glorot"},
    "resnet18": {"norm_eps": 1e-3, "stem_init": "glorot", "residual_relu": True},
}
"""Options of the published networks: TensorFlow's defaults, and one more ReLU in every block."""

CUTOFF = {"cutoff": RELEASED["cutoff"]}

METHODS: Mapping[str, Mapping[str, Any]] = {
    "soro": RELEASED,
    "soro+dbt": RELEASED,
    "procrustes": CUTOFF,
    "soro-kappa": CUTOFF,
    "normsum": CUTOFF,
    "scaledsum": CUTOFF,
    "maxdo": {"variant": "descent"},
}
"""Settings of methods in the published code, and its eigenvalue cut-off for the methods that are compared with SORO."""


@preset("paper")
def paper(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the momentum of batch-norm as published."""
    return dict(PAPER)


@preset("released")
def released(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the published code does; each of these is a setting, so that one change at a time can be studied.

    >>> released({"backbone": "mlp", "method": {"name": "er"}})["backbone"]
    {'name': 'mlp', 'init': 'glorot'}
    """
    name, _ = named_options(settings["backbone"], "backbone")
    method = settings["method"]["name"]
    return PAPER | {
        "normalise": False,
        "optimizer": {"name": "adam", "eps": 1e-7},
        "memory": "epochs",
        "backbone": {"name": name, **BACKBONES.get(name, {})},
        "method": {"name": method, "weigh_heads": True, "head_init": "glorot", **METHODS.get(method, {})},
    }
