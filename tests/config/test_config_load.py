"""From YAML and `key=value` words to a Config: values, layers, shorthands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config import Config, load_config


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(None, []) == Config()


@pytest.mark.parametrize("text", ["", "# only a comment\n", "lora:\ntraining:\n"])
def test_an_empty_file_is_the_defaults(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == Config()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, "training:\n  batch_size: 2\n  epochs: 1\n", "training.batch_size=8")
    assert (config.training.batch_size, config.training.epochs) == (8, 1.0)


def test_a_later_word_wins_over_an_earlier_one() -> None:
    assert load_config(None, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("training.learning_rate=1e-4", "learning_rate", 1e-4),
        ("training.learning_rate=5E-05", "learning_rate", 5e-5),
        ("training.learning_rate=.001", "learning_rate", 0.001),
        ("training.max_steps=null", "max_steps", None),
        ("training.max_steps=1_000", "max_steps", 1000),
        ("training.gradient_checkpointing=true", "gradient_checkpointing", True),
        ("training.gradient_checkpointing=yes", "gradient_checkpointing", True),
        ("training.resume=runs/a/checkpoints/checkpoint-10", "resume", "runs/a/checkpoints/checkpoint-10"),
        ("--training.batch_size=3", "batch_size", 3),
    ],
)
def test_values_on_the_command_line(word: str, key: str, value: object) -> None:
    found = getattr(load_config(None, [word]).training, key)
    assert (found, type(found)) == (value, type(value))


def test_numbers_in_yaml_are_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, "training: {learning_rate: 1e-4, weight_decay: 1.5e-2}\n")
    assert (config.training.learning_rate, config.training.weight_decay) == (1e-4, 0.015)


def test_text_that_yaml_1_1_would_turn_into_something_else(tmp_path: Path) -> None:
    config = load(tmp_path, "device: cuda:1\nmodel: {revision: 2024-01-01}\ndata: {subset: 12:30}\n")
    assert (config.device, config.model.revision, config.data.subset) == ("cuda:1", "2024-01-01", "12:30")


@pytest.mark.parametrize(
    ("word", "value"),
    [("model_parallel=null", None), ("model_parallel=None", None), ("use_model_parallel=True", True)],
)
def test_model_parallel_stays_three_valued(word: str, value: bool | None) -> None:
    config = load_config(None, [word])
    assert config.model_parallel is value
    assert "model_parallel" in config.model_fields_set


def test_a_number_for_a_text_setting_on_the_command_line_is_its_characters() -> None:
    config = load_config(None, ["model.revision=0012345", "model=12e4567", "data=2024"])
    assert (config.model.revision, config.model.name, config.data.source) == ("0012345", "12e4567", "2024")


@pytest.mark.parametrize("text", ["a #b", "key: value", "*.json", "100%", "it's"])
def test_signs_of_yaml_mean_themselves_in_a_plain_word(text: str) -> None:
    assert load_config(None, [f"data={text}"]).data.source == text


def test_lists_and_mappings_on_the_command_line() -> None:
    config = load_config(
        None,
        [
            "lora.targets=[q_proj,v_proj]",
            "data.columns={instruction: question}",
            "samples={prompts: ['a b']}",
        ],
    )
    assert config.lora.targets == ["q_proj", "v_proj"]
    assert config.data.columns == {"instruction": "question"}
    assert config.samples.prompts == ["a b"]


def test_shorthands(tmp_path: Path) -> None:
    config = load(tmp_path, "model: Qwen/Qwen3-0.6B\ndata: rows.jsonl\n")
    assert (config.model.name, config.data.source) == ("Qwen/Qwen3-0.6B", "rows.jsonl")


def test_a_shorthand_on_the_command_line_keeps_the_rest_of_the_section(tmp_path: Path) -> None:
    config = load(
        tmp_path, "data: {source: old.json, max_length: 256, columns: {text: body}}\n", "data=new.json"
    )
    assert (config.data.source, config.data.max_length) == ("new.json", 256)
    assert config.data.columns == {"text": "body"}


def test_one_column_is_laid_over_the_mapping(tmp_path: Path) -> None:
    text = "data: {columns: {instruction: a, output: b}}\n"
    assert load(tmp_path, text, "data.columns.output=c").data.columns == {"instruction": "a", "output": "c"}
    assert load(tmp_path, text, "data.columns={output: c}").data.columns == {"output": "c"}


def test_dotted_keys_in_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, "training.epochs: 2\n").training.epochs == 2.0


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    text = "monitor: {report_to: &names [wandb, mlflow]}\nsamples: {prompts: *names}\n"
    config = load(tmp_path, text)
    assert config.monitor.report_to == config.samples.prompts == ["wandb", "mlflow"]
    merged = load(tmp_path, "training:\n  <<: {epochs: 1, batch_size: 2}\n  epochs: 5\n")
    assert (merged.training.epochs, merged.training.batch_size) == (5.0, 2)


@pytest.mark.parametrize("encoded", [b"\xef\xbb\xbfseed: 7\n", b"seed: 7\r\nlora:\r\n  r: 4\r\n"])
def test_byte_order_mark_and_crlf(tmp_path: Path, encoded: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(encoded)
    assert load_config(path, []).seed == 7


def test_only_what_was_given_counts_as_given(tmp_path: Path) -> None:
    config = load(tmp_path, "training: {epochs: 3.0}\n", "lr=1e-3")
    assert config.training.model_fields_set == {"epochs", "learning_rate"}
    assert config.model_fields_set == {"training"}


def test_importing_and_loading_needs_no_heavy_library(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-4\n")
    code = (
        "import sys; from pathlib import Path; from trimtab.config import *;"
        f"dump_config(load_config(Path({str(path)!r}), [])); config_schema();"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
