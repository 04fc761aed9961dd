"""Code that comes with a model runs only where its repository was named on the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.config import dump_config, load_config
from trimtab.config.problems import ConfigError
from trimtab.errors import RequestError
from trimtab.models.load import load_model_config, load_tokenizer

Trimtab = Callable[..., subprocess.CompletedProcess[str]]

CODE = """
from pathlib import Path
from transformers import LlamaConfig
Path({ran!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"
"""


@pytest.fixture
def with_code(tiny_model: Path, tmp_path: Path) -> Path:
    """A model whose folder brings code that leaves a mark when it runs."""
    folder = tmp_path / "with-code"
    shutil.copytree(tiny_model, folder)
    (folder / "configuration_own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    write_map(folder, "configuration_own.OwnConfig")
    return folder


def write_map(folder: Path, where: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": where}}
    (folder / "config.json").write_text(json.dumps(config))


def test_without_the_flag_no_code_runs_and_the_flag_is_named(with_code: Path, tmp_path: Path) -> None:
    settings = load_config(None, [f"model={with_code}"]).model
    with pytest.raises(RequestError, match=f"--trust-remote-code {with_code}"):
        load_model_config(settings)
    assert not (tmp_path / "ran").exists()


def test_with_the_flag_it_runs(with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    settings = load_config(None, [f"model={with_code}", f"trust_remote_code={with_code}"]).model
    assert type(load_model_config(settings)).__name__ == "OwnConfig"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_trust_in_a_repository_is_none_in_the_one_it_sends_us_to(
    with_code: Path, tmp_path: Path, place: str
) -> None:
    other = "else/where--modeling_own.Own"
    if place == "config.json":
        write_map(with_code, other)
    else:
        file = with_code / place
        content = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": [None, other]}}
        file.write_text(json.dumps(content))
    settings = load_config(None, [f"model={with_code}", f"trust_remote_code={with_code}"]).model
    load = load_model_config if place == "config.json" else load_tokenizer
    with pytest.raises(RequestError, match="its code comes from else/where") as caught:
        load(settings)
    assert "--trust-remote-code else/where" in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("said", ["true", "[a/b]", "a/b"])
def test_a_file_cannot_say_that_code_may_run(said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"model: {{name: a/b, trust_remote_code: {said}}}\n")
    with pytest.raises(ConfigError, match="--trust-remote-code OWNER/NAME"):
        load_config(tmp_path / "c.yaml")


def test_a_plain_yes_or_another_name_is_refused(trimtab: Trimtab) -> None:
    for words, told in (
        (["--trust-remote-code", "true"], "name it: --trust-remote-code OWNER/NAME"),
        (["--trust-remote-code", "b/c"], "does not name the model, a/b"),
    ):
        done = trimtab("plan", "model=a/b", *words)
        assert done.returncode == 2
        assert told in done.stderr


def test_it_is_not_kept_with_a_run_and_false_is_nothing(tmp_path: Path) -> None:
    config = load_config(None, ["model=a/b", "--trust-remote-code=a/b".removeprefix("--").replace("-", "_")])
    text = dump_config(config)
    assert "# The code of a/b was trusted by a flag" in text
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml").model.trust_remote_code == []
    assert load_config(None, ["trust_remote_code=false"]).model.trust_remote_code == []
