"""Backbones of other libraries, where they are installed: ``timm:NAME`` and ``transformers:NAME``."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.models.input_spec import InputSpec
from spcl.models.registry import BACKBONES
from spcl.suggestions import did_you_mean

__all__ = ["FeatureExtractor", "timm_backbone", "transformers_backbone"]


@BACKBONES.register("timm:")
def timm_backbone(
    inputs: InputSpec, *, model: str, pretrained: bool = False, weights: str | None = None, **options: Any
) -> nn.Module:
    """Any model of timm without its classifier, e.g. ``timm:resnet50``.

    Args:
        inputs: the shape of the images.
        model: its name in timm.
        pretrained: download the published weights.
        weights: a file of weights (.safetensors) instead.
        options: of ``timm.create_model``.
    """
    try:
        import timm
    except ImportError as error:
        raise SpclError(f'timm:{model} needs timm ({error}); run: pip install "spcl[timm]"') from error
    if len(inputs.shape) != 3:
        raise SpclError(f"timm:{model} needs images, channels × height × width, but the samples are {inputs}")
    options = {"num_classes": 0, "in_chans": inputs.shape[0]} | options
    try:
        network: nn.Module = timm.create_model(model, pretrained=pretrained, **options)
    except (RuntimeError, OSError) as error:
        raise SpclError(f"timm cannot make {model!r}: {error}") from error
    return _with_weights(network, weights)


@BACKBONES.register("transformers:")
def transformers_backbone(
    inputs: InputSpec, *, model: str, pretrained: bool = False, weights: str | None = None, **options: Any
) -> nn.Module:
    """Any model of Hugging Face Transformers, its last hidden state averaged over the tokens that are not masked.

    Args:
        inputs: tokens, images, or a dict such as ``input_ids`` and ``attention_mask``.
        model: a model type such as ``bert``, with random weights; with ``pretrained``, a name on the hub or a folder.
        pretrained: load configuration and weights from there.
        weights: a file of weights (.safetensors) for a model type.
        options: of its configuration, e.g. ``hidden_size``.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
    except ImportError as error:
        raise SpclError(f'transformers:{model} needs it ({error}); run: pip install "spcl[transformers]"') from error
    try:
        if pretrained:
            return FeatureExtractor(AutoModel.from_pretrained(model, **options))
        if model not in CONFIG_MAPPING:
            raise SpclError(f"transformers has no model type {model!r}; {_nearest(model, CONFIG_MAPPING)}")
        known = AutoConfig.for_model(model).to_dict()
        for option in options:
            if option not in known:
                raise SpclError(f"backbone 'transformers:{model}' has no option {option!r}; {_nearest(option, known)}")
        if inputs.vocabulary is not None and "vocab_size" in known:
            options = {"vocab_size": inputs.vocabulary} | options
        network = AutoModel.from_config(AutoConfig.for_model(model, **options))
    except (OSError, ValueError, RuntimeError) as error:
        raise SpclError(f"transformers cannot make {model!r}: {str(error).splitlines()[0]}") from error
    return FeatureExtractor(_with_weights(network, weights))


class FeatureExtractor(nn.Module):
    """A model of Transformers as a backbone: the mean of its last hidden state over the tokens that are not masked.

    Args:
        model: takes keyword arguments and returns an object with ``last_hidden_state``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.feature_dim: int = model.config.hidden_size

    def forward(self, x: Tensor | dict[str, Tensor]) -> Tensor:
        """Return the features of a batch: of a tensor, or of a dict of keyword arguments."""
        arguments = {self.model.main_input_name: x} if isinstance(x, Tensor) else x
        hidden: Tensor = self.model(**arguments).last_hidden_state
        mask = arguments.get("attention_mask")
        if mask is None:
            return hidden.mean(dim=1)
        shown = mask.to(hidden.dtype).unsqueeze(-1)
        return (hidden * shown).sum(dim=1) / shown.sum(dim=1).clamp(min=1)


def _nearest(name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
    return hint if hint.endswith("?") else "see the documentation of Transformers"


def _with_weights(network: nn.Module, weights: str | None) -> nn.Module:
    """Load weights from a file; parts that it lacks, or has in addition, are an error."""
    if weights is None:
        return network
    path = Path(weights).expanduser()
    try:
        state = load_file(path)
    except Exception as error:
        raise SpclError(f"cannot read the weights {path} ({error}); give a .safetensors file") from error
    try:
        network.load_state_dict(
            {
                name: tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
                for name, tensor in state.items()
            }
        )
    except RuntimeError as error:
        raise SpclError(f"the weights {path} do not fit the network: {error}") from error
    return network
