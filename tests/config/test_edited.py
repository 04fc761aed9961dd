"""A config that is changed for its user stays the user's: comments, names and order, and only the changes are new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_config, load_request
from trimtab.config.edited import edited_text

TEXT = """\
# my run
model: smollm2   # the built-in one
data:
  source: device-errors
  max_length: 256  # tokens

training:
  batch_size: 16
  # slow, but it learns
  learning_rate: 1.0e-3
  max_steps: 8

output_dir: runs/mine  # on the large disk
"""


def made(tmp_path: Path, text: str, changes: dict[str, Any], words: tuple[str, ...] = ()) -> str:
    """The text once `changes` are made; it says exactly what was wanted."""
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    request = load_request(file, words)
    wanted = request.config.model_copy(deep=True)
    for key, value in changes.items():
        section, _, leaf = key.rpartition(".")
        setattr(getattr(wanted, section) if section else wanted, leaf, value)
    new = edited_text(request, wanted)
    (tmp_path / "new.yaml").write_text(new)
    assert load_config(tmp_path / "new.yaml").model_dump() == wanted.model_dump()
    return new


def test_a_value_is_exchanged_where_it_stands(tmp_path: Path) -> None:
    new = made(tmp_path, TEXT, {"training.batch_size": 4, "data.max_length": 128})
    expected = TEXT.replace("batch_size: 16", "batch_size: 4  # was 16")
    assert new == expected.replace("max_length: 256  # tokens", "max_length: 128  # was 256 (tokens)")


def test_what_is_new_goes_into_its_section_and_the_rest_to_the_end(tmp_path: Path) -> None:
    new = made(
        tmp_path,
        TEXT,
        {"training.gradient_accumulation_steps": 2, "processes": 1, "speed.activation_memory_budget": 0.5},
    )
    kept = TEXT.replace("  max_steps: 8\n", "  max_steps: 8\n  gradient_accumulation_steps: 2\n")
    assert new.startswith(kept)
    assert sorted(new.removeprefix(kept).splitlines()) == sorted(
        ["processes: 1", "speed:", "  activation_memory_budget: 0.5"]
    )


def test_a_section_in_one_word_or_in_braces_takes_more(tmp_path: Path) -> None:
    text = TEXT.replace("  batch_size: 16\n", "").replace(
        "training:\n  # slow, but it learns\n  learning_rate: 1.0e-3\n  max_steps: 8\n",
        "training: {learning_rate: 1.0e-3, max_steps: 8}  # short\n",
    )
    new = made(tmp_path, text, {"training.batch_size": 2, "model.quantize": "nf4"})
    assert "training: {learning_rate: 1.0e-3, max_steps: 8, batch_size: 2}  # short\n" in new
    assert "model: {name: smollm2, quantize: nf4}   # the built-in one\n" in new


def test_names_of_other_libraries_stay_as_they_were_written(tmp_path: Path) -> None:
    text = "model_name_or_path: smollm2\ntrain_file: device-errors\nper_device_train_batch_size: 8\ndevice: cpu\n"
    new = made(tmp_path, text, {"training.batch_size": 2, "device": "cuda"})
    assert new == text.replace("_size: 8", "_size: 2  # was 8").replace("cpu", "cuda  # was cpu")


def test_what_was_said_on_the_command_line_is_written_down(tmp_path: Path) -> None:
    new = made(
        tmp_path, TEXT, {}, ("training.batch_size=2", "lora.targets=[q_proj, v_proj]", "model=smollm2")
    )
    assert "batch_size: 2  # was 16" in new
    assert "lora:\n  targets:\n  - q_proj\n  - v_proj\n" in new


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("batch_size: 16", "batch_size: &n 16").replace("max_steps: 8", "max_steps: *n"),
        TEXT + "use_cpu: true\n",
        "{model: smollm2, data: {source: device-errors}, training: {max_steps: 3,}}",
        "",
    ],
    ids=["an anchor", "a name that is converted", "braces around all", "nothing"],
)
def test_what_cannot_be_edited_is_written_anew_with_the_given_settings_alone(
    tmp_path: Path, text: str
) -> None:
    words = ("data.source=device-errors",) if not text else ()
    new = made(tmp_path, text, {"training.batch_size": 2, "device": "cuda"}, words)
    assert len(new.splitlines()) < 25
    assert "monitor:" not in new


def test_code_that_a_flag_trusts_is_not_written_down(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    request = load_request(file, ["model=me/code", "model.trust_remote_code=[me/code]"])
    assert "trust" not in edited_text(request, request.config)


def test_what_comes_back_to_the_files_own_value_is_left_alone(tmp_path: Path) -> None:
    assert made(tmp_path, TEXT, {"training.batch_size": 16}, ("training.batch_size=64",)) == TEXT
