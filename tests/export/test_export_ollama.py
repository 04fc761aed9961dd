"""Modelfiles, and the command that is run or printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from export_helpers import LlamaCpp, byte_level_tokenizer, tiny_model, write_full_run
from transformers import LlamaConfig
from typer.testing import CliRunner

from trimtab.cli.export import export
from trimtab.config import Config, dump_config
from trimtab.errors import RequestError, TrimtabError
from trimtab.export import export_run, gotemplate
from trimtab.export.chat_template import OllamaChat
from trimtab.export.ollama import model_name, modelfile

CHAT = OllamaChat(template="{{ range .Messages }}{{ .Content }}{{ end }}", stops=["<|im_end|>", "### A"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=480,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    return write_full_run(tmp_path / "My Run", tiny_model(config), byte_level_tokenizer("smollm"))


def test_modelfile() -> None:
    text = modelfile(
        "model.gguf", CHAT, num_ctx=2048, temperature=0.2, system='Say "hi".\nThen stop.', license_name="mit"
    )
    assert text == (
        "FROM ./model.gguf\n"
        'TEMPLATE """{{ range .Messages }}{{ .Content }}{{ end }}"""\n'
        'PARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop "### A"\n'
        "PARAMETER num_ctx 2048\n"
        "PARAMETER temperature 0.2\n"
        'SYSTEM """Say "hi".\nThen stop."""\n'
        'LICENSE "mit"\n'
    )


def test_modelfile_says_only_what_was_asked() -> None:
    text = modelfile("model.gguf", CHAT, num_ctx=2048)
    assert not any(word in text for word in ("SYSTEM", "LICENSE", "temperature"))


@pytest.mark.parametrize("text", ['three """ quotes', "no\u00a0break", "bell\a", "zero\u200bwidth"])
def test_text_that_ollama_would_change_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="SYSTEM of the Modelfile"):
        modelfile("model.gguf", CHAT, num_ctx=2048, system=text)


def test_model_names() -> None:
    assert model_name("My Run (2)") == "my-run-2"
    assert model_name("···") == "trimtab-model"


def test_without_ollama_the_command_is_printed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = export_run(run, "ollama", system="Be brief.")
    assert [file.name for file in result.files] == ["model.gguf", "Modelfile"]
    assert not result.created
    assert result.lines()[-1].endswith(f"ollama create my-run -f '{run}/export/ollama/Modelfile'")
    text = (result.folder / "Modelfile").read_text()
    assert "PARAMETER num_ctx 256\n" in text
    # The TEMPLATE, read back from the file, writes what the tokenizer's template does.
    template = text.split('TEMPLATE """')[1].split('"""')[0]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    tokenizer = byte_level_tokenizer("smollm")
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert gotemplate.render(template, messages) == prompt
    assert LlamaCpp(result.files[0]).tokens(prompt) == tokenizer(prompt).input_ids


def recorder(folder: Path, exit_code: int) -> None:
    """A program called `ollama` that notes its arguments: what is tested is the call, not Ollama."""
    program = folder / "ollama"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(folder / 'called')!r}, 'w').write(repr(sys.argv[1:]))\n"
        f"print('no server', file=sys.stderr)\nsys.exit({exit_code})\n"
    )
    program.chmod(0o755)


def test_with_ollama_the_command_is_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder(tmp_path, 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = export_run(run, "ollama", name="me/tuned:v1")
    assert result.created
    assert (tmp_path / "called").read_text() == repr(
        ["create", "me/tuned:v1", "-f", str(run / "export" / "ollama" / "Modelfile")]
    )


def test_a_failing_ollama_is_an_error_and_keeps_the_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder(tmp_path, 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrimtabError, match="no server"):
        export_run(run, "ollama")
    assert (run / "export" / "ollama" / "model.gguf").is_file()
    (tmp_path / "called").unlink()
    assert not export_run(run, "ollama", create=False).created
    assert not (tmp_path / "called").exists()


def test_bad_names_and_contexts_are_refused_before_any_work(run: Path) -> None:
    with pytest.raises(RequestError, match="not a name that Ollama takes"):
        export_run(run, "ollama", name="has space")
    with pytest.raises(RequestError, match="num_ctx 9999"):
        export_run(run, "ollama", num_ctx=9999)
    assert not (run / "export").exists()


@pytest.fixture
def verb() -> typer.Typer:
    app = typer.Typer()
    app.command()(export)
    return app


def test_command_line(run: Path, verb: typer.Typer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        verb, [str(run), "--to", "gguf", "--dtype", "q8_0", "--out", str(out), "--name", "n"]
    )
    assert done.exit_code == 0, done.output
    assert f"{out}/model-q8_0.gguf  " in done.stdout
    assert (out / "model-q8_0.gguf").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to", "merged", "--adapter-only"],
        ["--to", "gguf", "--system", "x"],
        ["--to", "gguf", "--num-ctx", "9"],
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], run: Path, verb: typer.Typer) -> None:
    done = CliRunner().invoke(verb, [str(run), *arguments])
    assert isinstance(done.exception, RequestError)
    assert not (run / "export").exists()


def test_an_unknown_number_format_is_a_usage_error(run: Path, verb: typer.Typer) -> None:
    assert CliRunner().invoke(verb, [str(run), "--to", "gguf", "--dtype", "q4_0"]).exit_code == 2


@pytest.mark.parametrize(
    ("settings", "data", "bare"),
    [
        ({}, None, False),
        ({}, {"train": {"format": "messages"}}, False),
        ({}, {"train": {"format": "prompt_completion"}}, False),
        ({}, {"train": {"format": "text"}}, True),
        ({"data": {"format": "text"}}, None, True),
        ({"recipe": "grpo", "grpo": {"reward": "length"}}, None, False),
        ({"recipe": "grpo", "grpo": {"reward": "length", "chat": False}}, None, True),
        # Prompts that are messages go through the template all the same.
        ({"recipe": "grpo", "grpo": {"reward": "length", "chat": False}}, {"chat": True}, False),
        ({"recipe": "zeroth_order", "zeroth": {"task": "sst2"}}, {"rows": 3}, True),
    ],
)
def test_the_template_follows_how_the_model_was_trained(
    run: Path, settings: dict[str, Any], data: dict[str, Any] | None, bare: bool
) -> None:
    config = Config.model_validate({"method": "full", **settings})
    (run / "config.yaml").write_text(dump_config(config))
    if data is not None:
        (run / "data.json").write_text(json.dumps(data))
    result = export_run(run, "ollama", create=False)
    template = (result.folder / "Modelfile").read_text().split('TEMPLATE """')[1].split('"""')[0]
    assert ("<|im_start|>" not in template) is bare
    assert any("bare" in note for note in result.notes) is bare
    if bare:
        assert gotemplate.execute(template, {"System": "", "Prompt": "2 + 2 ="}) == "2 + 2 ="
        assert gotemplate.execute(template, {"System": "Sum.", "Prompt": "2 + 2 ="}) == "Sum.\n2 + 2 ="
