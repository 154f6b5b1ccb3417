"""Backbones of other libraries, where they are installed: ``timm:NAME`` and ``transformers:NAME``."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from spcl.errors import SpclError, did_you_mean, install_command
from spcl.models.backbone import BACKBONES, InputSpec


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
        options: numbers and words of ``timm.create_model``; none that names a file.
    """
    _check_timm(model, options)
    try:
        import timm
    except ImportError as error:
        raise SpclError(f"timm:{model} needs timm ({error}); run: {install_command('timm')}") from error
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
        pretrained: load configuration and weights from there, never code; from a folder, weights in safetensors only.
        weights: a file of weights (.safetensors) for a model type.
        options: of its configuration, e.g. ``hidden_size``.
    """
    if "trust_remote_code" in options:
        raise SpclError(f"transformers:{model} runs no code of others, as trust_remote_code would; {OWN_CODE}")
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PretrainedConfig
    except ImportError as error:
        raise SpclError(f"transformers:{model} needs it ({error}); run: {install_command('transformers')}") from error
    try:
        if pretrained:
            _check_kernels(model, PretrainedConfig.get_config_dict(model)[0])
            plain = AutoConfig.from_pretrained(model, trust_remote_code=False)
        elif model in CONFIG_MAPPING:
            plain = AutoConfig.for_model(model)
        else:
            raise SpclError(f"transformers has no model type {model!r}; {_nearest(model, CONFIG_MAPPING)}")
        known = plain.to_dict()
        _check_options(f"transformers:{model}", options, known)
        if pretrained:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False, **options)
            _check_nested(config.to_dict())
            safe = True if Path(model).exists() else None
            return FeatureExtractor(
                AutoModel.from_pretrained(model, config=config, trust_remote_code=False, use_safetensors=safe)
            )
        if inputs.vocabulary is not None and "vocab_size" in known:
            options = {"vocab_size": inputs.vocabulary} | options
        config = AutoConfig.for_model(model, **options)
        _check_nested(config.to_dict())
        network = AutoModel.from_config(config)
    except SpclError:
        raise
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


TIMM_WORDS = frozenset(
    {"act_layer", "aa_layer", "attn_layer", "global_pool", "norm_layer", "pool_type", "pos_embed", "stem_type"}
)
"""The options of timm that may be words: none of them names a file, a folder or code."""

OWN_CODE = "write a plug-in with @backbone that makes this model: its code is recorded with a checksum"


def _check_timm(model: str, options: Mapping[str, Any]) -> None:
    """Refuse names and options that make timm read files: some files could run code."""
    if model.startswith(("local-dir:", "local_dir:")):
        raise SpclError(f"timm:{model} reads a folder; give the model's name, and its weights as weights=FILE")
    for option, value in options.items():
        words = [each for each in _values(value) if not isinstance(each, bool | int | float | None)]
        if isinstance(value, Mapping) or (words and option not in TIMM_WORDS):
            raise SpclError(
                f"backbone 'timm:{model}': {option} is {value!r:.80}, but options are numbers, or words for "
                f"{', '.join(sorted(TIMM_WORDS))}; give weights=FILE for a file of weights, or {OWN_CODE}"
            )


def _check_options(backbone: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse options that are not of the configuration of a model of Transformers, and those that name files."""
    for option, value in options.items():
        if option not in known:
            raise SpclError(f"backbone {backbone!r} has no option {option!r}; {_nearest(option, known)}")
        for each in _values(value):
            if isinstance(each, str) and not re.fullmatch(r"[\w.+-]*", each):
                raise SpclError(f"backbone {backbone!r}: {option} is {value!r:.80}, but it takes words; {OWN_CODE}")


def _check_nested(config: Any) -> None:
    """Refuse what a model of Transformers would pass on to timm, as :func:`timm_backbone` does."""
    for part in _parts(config):
        if str(part.get("model_type")).startswith("timm_"):
            options = part.get("model_args") or {}
            _check_timm(str(part.get("architecture") or part.get("backbone")), options)


KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""What of a configuration may name a repository, whose kernels the library ``kernels`` would download and run."""


def _check_kernels(model: str, config: Any) -> None:
    """Refuse a configuration that names code of others."""
    for part in _parts(config):
        for name in KERNELS:
            if any("/" in str(each) for each in _values(part.get(name))):
                raise SpclError(
                    f"transformers:{model} runs no code of others, as its {name} = {part[name]!r:.80} would; {OWN_CODE}"
                )


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a dict and all dicts within it."""
    if isinstance(value, Mapping):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _parts(inner)


def _values(value: Any) -> Iterator[Any]:
    """Yield a value, or all values within nested lists and dicts."""
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _values(inner)
    else:
        yield value


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
