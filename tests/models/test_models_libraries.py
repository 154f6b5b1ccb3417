"""Backbones of timm and of Hugging Face Transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spcl.errors import SpclError
from spcl.models import BACKBONES, FeatureExtractor, InputSpec
from trained_runs import write_model_with_code

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    return {"input_ids": torch.randint(1, 50, (3, 5), generator=generator) * mask, "attention_mask": mask}


def test_features_are_the_mean_over_tokens_that_are_not_masked(tokens: dict[str, torch.Tensor]) -> None:
    pytest.importorskip("transformers")
    backbone = BACKBONES.make({"name": "transformers:bert", **TINY}, InputSpec.of(tokens)).eval()
    assert isinstance(backbone, FeatureExtractor)
    assert backbone.model.config.vocab_size == int(tokens["input_ids"].max()) + 1
    hidden = backbone.model(**tokens).last_hidden_state
    expected = torch.stack([hidden[0, :3].mean(0), hidden[1].mean(0), hidden[2, 0]])
    torch.testing.assert_close(backbone(tokens), expected)
    assert backbone.feature_dim == expected.shape[1]
    longer = {name: torch.nn.functional.pad(part, (0, 3)) for name, part in tokens.items()}
    torch.testing.assert_close(backbone(longer), expected)  # padding changes nothing


def test_weights_come_from_a_file_or_a_folder(tokens: dict[str, torch.Tensor], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    inputs = InputSpec.of(tokens)
    first = BACKBONES.make({"name": "transformers:bert", **TINY}, inputs).eval()
    first.model.save_pretrained(tmp_path / "folder")
    save_file(first.model.state_dict(), tmp_path / "weights.safetensors")
    from_folder = {"name": f"transformers:{tmp_path / 'folder'}", "pretrained": True}
    from_file = {"name": "transformers:bert", "weights": str(tmp_path / "weights.safetensors"), **TINY}
    for setting in (from_folder, from_file):
        torch.testing.assert_close(BACKBONES.make(setting, inputs).eval()(tokens), first(tokens))
    with pytest.raises(SpclError, match=r"weights\.safetensors do not fit the network"):
        BACKBONES.make(from_file | {"hidden_size": 32}, inputs)
    with pytest.raises(SpclError, match=r"cannot read the weights .*nothing\.safetensors"):
        BACKBONES.make(from_file | {"weights": str(tmp_path / "nothing.safetensors")}, inputs)


def test_a_model_of_images(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    images = torch.rand(2, 3, 16, 16)
    setting = {"name": "transformers:vit", "image_size": 16, "patch_size": 8, **TINY}
    assert BACKBONES.make(setting, InputSpec.of(images))(images).shape == (2, 16)


def test_unknown_models_and_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = InputSpec((4,), torch.int64, 10)
    if pytest.importorskip("transformers"):
        with pytest.raises(SpclError, match="transformers has no model type 'no-such-model'"):
            BACKBONES.make("transformers:no-such-model", inputs)
    for library in ("timm", "transformers"):
        monkeypatch.setitem(__import__("sys").modules, library, None)
        with pytest.raises(SpclError, match=rf"pip install .*\[{library}\]"):
            BACKBONES.make(f"{library}:x", inputs)


def test_timm_models_give_features_of_any_number_of_channels(tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm needs a torchvision that fits PyTorch", exc_type=ImportError)
    inputs = InputSpec((1, 32, 32), torch.float32)
    backbone = BACKBONES.make("timm:resnet10t", inputs)
    images = torch.rand(2, 1, 32, 32)
    assert backbone(images).shape[0] == 2
    save_file(backbone.state_dict(), tmp_path / "weights.safetensors")
    again = BACKBONES.make({"name": "timm:resnet10t", "weights": str(tmp_path / "weights.safetensors")}, inputs)
    torch.testing.assert_close(again.eval()(images), backbone.eval()(images))
    with pytest.raises(SpclError, match=r"timm cannot make 'no_such_model'"):
        BACKBONES.make("timm:no_such_model", inputs)


@pytest.mark.parametrize(
    "setting",
    [
        {"name": "timm:resnet10t", "checkpoint_path": "weights.pth"},
        {"name": "timm:resnet10t", "pretrained_cfg_overlay": {"file": "weights.pth"}, "pretrained": True},
        {"name": "timm:local-dir:/somewhere", "pretrained": True},
        {"name": "transformers:timm_wrapper", "architecture": "resnet18", "model_args": {"checkpoint_path": "a.pth"}},
        {"name": "transformers:bert", "trust_remote_code": True},
        {"name": "transformers:bert", "hidden_act": "../activation"},
        {"name": "transformers:bert", "attn_implementation": "somebody/kernels"},
    ],
    ids=lambda setting: next(option for option in [*setting, setting["name"]] if option not in ("name", "pretrained")),
)
def test_options_that_would_read_files_or_run_code_are_refused(setting: dict[str, object]) -> None:
    if str(setting["name"]).startswith("transformers:"):
        pytest.importorskip("transformers")
    with pytest.raises(SpclError, match=r"@backbone|weights=FILE|has no option 'attn_implementation'"):
        BACKBONES.make(setting, InputSpec((3, 32, 32), torch.float32))


def test_a_folder_of_a_model_runs_no_code_and_is_read_without_pickles(
    tokens: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder, inputs = tmp_path / "model", InputSpec.of(tokens)
    BACKBONES.make({"name": "transformers:bert", **TINY}, inputs).model.save_pretrained(folder)
    mark = write_model_with_code(folder)
    setting = {"name": f"transformers:{folder}", "pretrained": True}
    with pytest.raises(SpclError, match="transformers cannot make"):
        BACKBONES.make(setting, inputs)
    with pytest.raises(SpclError, match="runs no code of others"):
        BACKBONES.make(setting | {"trust_remote_code": True}, inputs)
    assert not mark.exists()
    BACKBONES.make({"name": "transformers:bert", **TINY}, inputs).model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for part in ({"attn_implementation": "somebody/kernels"}, {"text_config": {"attn_implementation": {"": "a/b"}}}):
        (folder / "config.json").write_text(json.dumps(config | part))
        with pytest.raises(SpclError, match="runs no code of others, as its attn_implementation"):
            BACKBONES.make(setting, inputs)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    torch.save(load_file(tmp_path / "model.safetensors"), folder / "pytorch_model.bin")
    with pytest.raises(SpclError, match=r"no file named model\.safetensors"):
        BACKBONES.make(setting, inputs)
