"""The settings of a service: from a file, checked, and what they say of samples."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spcl.errors import DataError, SpclError
from spcl.serve import ServeSettings, load_serve_settings
from spcl.serve.settings import HttpSettings, InputSettings, TaskSettings
from spcl.serve.state import Records, new_learner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "serve"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("state: s\nsource: folder\n", "inputs must be given"),
        ("state: s\nsource: folder\ninputs: {shapes: [3]}\n", "no setting 'shapes'; did you mean 'shape'"),
        ("state: s\nsource: folder\ninputs: {dtype: real}\n", "no type of a tensor"),
        ("state: s\nsource: folder\ninputs: {}\nlearner: {benchmark: x}\n", "learner: there is no setting 'benchmark'"),
        ("state: s\nsource: folder\ninputs: {}\ntasks: {start: now}\n", "start = 'now'"),
        ("state: s\nsource: folder\ninputs: {}\nhttp: {token: secret}\n", "no setting 'token'"),
    ],
)
def test_wrong_settings_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(SpclError, match=message):
        load_serve_settings(tmp_path / "serve.yaml")


def test_settings_are_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "state: s\nsource: {name: folder, path: in}\ninputs: {parts: {a: {shape: [2]}, b: {dtype: int64}}}\n"
    (tmp_path / "serve.yaml").write_text(f"{text}learner: {{method: er}}\nhttp: {{token_file: token}}\n")
    settings = load_serve_settings(tmp_path / "serve.yaml")
    assert (settings.state, settings.source) == (tmp_path / "s", {"name": "folder", "path": str(tmp_path / "in")})
    assert settings.run_settings().method["name"] == "er"
    assert {name: part.shape for name, part in (settings.inputs.spec().parts or {}).items()} == {"a": (2,), "b": ()}
    with pytest.raises(SpclError, match="the token cannot be read"):
        settings.http.token()
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(SpclError, match="holds no token"):
        settings.http.token()
    (tmp_path / "token").write_text("secret\n")
    assert settings.http.token() == "secret"
    monkeypatch.setenv("TOKEN", "other")
    assert settings.http.model_copy(update={"token_variable": "TOKEN"}).token() == "other"


def test_settings_in_the_examples_are_valid() -> None:
    settings = load_serve_settings(EXAMPLES / "serve.yaml")
    assert settings.state == EXAMPLES / "state"
    assert settings.http.port == 8800
    page = (ROOT / "docs" / "serve.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(state:.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert set(yaml.safe_load(shown)) <= set(yaml.safe_load((EXAMPLES / "serve.yaml").read_text()))


def test_the_example_shows_every_setting() -> None:
    text = (EXAMPLES / "serve.yaml").read_text()
    for section in (ServeSettings, InputSettings, TaskSettings, HttpSettings):
        assert [name for name in section.model_fields if not re.search(rf"\b{name}:", text)] == []


def test_lists_become_the_parts_that_the_backbone_is_built_for() -> None:
    text, size = {"shape": [2], "dtype": "int64", "vocabulary": 10}, {"dtype": "float32"}

    def inputs(parts: dict[str, Any]) -> InputSettings:
        return InputSettings.model_validate({"parts": parts})

    named = inputs({"text": text, "size": size})
    x = named.samples({"size": [1, 2], "text": [[1, 2], [3, 4]]})
    assert isinstance(x, dict)
    assert list(x) == ["text", "size"]
    assert x["size"].dtype == torch.float32
    for names in (("1", "0"), ("2", "1"), ("00", "1")):  # as messages of sources are understood
        given = inputs(dict.fromkeys(names, size))
        assert type(given.samples({name: [5] for name in names})) is (tuple if names == ("1", "0") else dict)
        assert given.description().startswith("(" if names == ("1", "0") else "{")
    pair = inputs({"0": text, "1": size}).samples({"0": [[1, 2]], "1": [5]})
    assert isinstance(pair, tuple)
    for wrong in ([[1, 2]], {"text": [[1, 2]]}):
        with pytest.raises(DataError, match=r"give an object with the parts \['text', 'size'\]"):
            named.samples(wrong)
    for wrong in (["a"], [[1], [2, 3]], [None], [{}]):
        with pytest.raises(DataError, match=r"the inputs are no samples of float32\[\]"):
            InputSettings().samples(wrong)


def test_a_service_predicts_by_what_its_settings_say(tmp_path: Path) -> None:
    learner_settings = {"scenario": "class", "memory": "reservoir", "memory_budget": 10, "predict_by": "class-means"}
    given = ServeSettings.of(
        {
            "state": str(tmp_path / "state"),
            "source": {"name": "folder", "path": str(tmp_path / "hub")},
            "inputs": {"shape": [4]},
            "learner": learner_settings,
        }
    )
    assert new_learner(given.run_settings(), given.inputs, Records()).predict_by == "class-means"
