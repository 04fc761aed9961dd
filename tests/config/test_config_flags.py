"""Settings as people type them: flags with and without values beside `key=value`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.cli.arguments import config_from
from trimtab.config import ConfigError
from trimtab.config.facts import value_of_setting
from trimtab.config.flags import as_words

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--use_model_parallel", "True"], ["use_model_parallel=True"]),
        (["--learning_rate", "1e-4"], ["learning_rate=1e-4"]),
        (["--lora-r", "8"], ["lora_r=8"]),
        (["--training.batch-size=4"], ["training.batch_size=4"]),
        (["--overwrite"], ["overwrite=true"]),
        (["--overwrite", "run.yaml"], ["overwrite=true", "run.yaml"]),
        (["--overwrite", "no", "seed=1"], ["overwrite=no", "seed=1"]),
        (["--no-packing", "--seed", "3"], ["packing=false", "seed=3"]),
        (["--no_model_parallel"], ["model_parallel=false"]),
        (["--no-data.packing"], ["data.packing=false"]),
        (["--no_cuda"], ["no_cuda=true"]),
        (["--bf16", "--use-cpu", "false"], ["bf16=true", "use_cpu=false"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--learning-rate", "-1e-4"], ["learning_rate=-1e-4"]),
        (["--system-prompt", "-h is help"], ["system_prompt=-h is help"]),
        (["--system-prompt=--no, never"], ["system_prompt=--no, never"]),
        (["--output-dir", "a=b"], ["output_dir=a=b"]),
        (["--data.columns.my-text", "body"], ["data.columns.my-text=body"]),
        (["--resume_from_checkpoint", "runs/a"], ["resume_from_checkpoint=runs/a"]),
        (["--resume-from-checkpoint", "--seed=1"], ["resume_from_checkpoint=true", "seed=1"]),
        (["--training.resume", "seed=1"], ["training.resume=true", "seed=1"]),
        (["--do_train", "--deepspeed", "ds.json"], ["do_train=true", "deepspeed=ds.json"]),
        (
            ["--model", "smollm2", "--reward", "[answer, format]"],
            ["model=smollm2", "reward=[answer, format]"],
        ),
        (["--learning_rate", "--seed", "1"], ["--learning_rate", "seed=1"]),
        (["--output_dir", "seed=1"], ["--output_dir", "seed=1"]),
        (["run.yaml", "--", "seed=1"], ["run.yaml", "seed=1"]),
    ],
)
def test_flags_are_told_as_key_and_value(typed: list[str], words: list[str]) -> None:
    assert as_words(typed) == words
    assert as_words(words) == words


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        (["--use_model_parallel", "True"], "model_parallel", True),
        (["--use_model_parallel", "None"], "model_parallel", None),
        (["--no-use-model-parallel"], "model_parallel", False),
        (["--lora-r", "8"], "lora.r", 8),
        (["--learning-rate=1e-4"], "training.learning_rate", 1e-4),
        (["--max-steps", "none"], "training.max_steps", None),
        (["--no-bf16"], "precision", "fp32"),
        (["--use_peft", "no"], "method", "full"),
        (["--model.revision", "1234567"], "model.revision", "1234567"),
        (["--model.revision", "none"], "model.revision", "none"),
        (["--group_by_length", "yes", "--packing", "off"], "training.group_by_length", True),
        (["--optim", "sgd"], "training.optimizer", "sgd"),
    ],
)
def test_what_flags_mean(typed: list[str], key: str, value: object) -> None:
    assert value_of_setting(config_from(typed).config, key) == value


def test_a_config_may_stand_behind_flags(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\ntraining: {batch_size: 2}\n")
    request = config_from(
        ["--seed", "5", "--overwrite", str(tmp_path / "run.yaml"), "--output-dir", "runs/a"]
    )
    assert request.origin == str(tmp_path / "run.yaml")
    assert (request.config.seed, request.config.training.batch_size, request.config.overwrite) == (5, 2, True)


def test_all_that_is_wrong_with_flags_is_in_one_report() -> None:
    typed = ["--learning_rat", "1e-4", "--lora-r", "-8", "--batch_size", "--no-pakcing", "--seed", "maybe"]
    typed += ["stray", "-lr"]
    with pytest.raises(ConfigError) as caught:
        config_from(typed)
    told = {problem.key: (problem.reason, problem.change) for problem in caught.value.problems}
    assert told.pop("learning_rat") == ("is not a setting", "did you mean training.learning_rate?")
    assert told.pop("lora.r")[0] == "must be at least 1"
    reason, change = told.pop('"--batch_size"')
    assert reason == "needs a value"
    assert "--batch_size VALUE" in change
    assert told.pop("no_pakcing")[1] == "did you mean data.packing?"
    assert told.pop("seed")[0] == "must be a whole number, not text"
    assert {reason for reason, _ in told.values()} == {"is not of the form key=value or --key value"}
    assert set(told) == {'"stray"', '"-lr"'}


def test_the_options_of_a_verb_stay_its_own(trimtab: Trimtab) -> None:
    done = trimtab("plan", "--lora-r", "4", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "cpu"
    assert "Usage" in trimtab("train", "--seed", "1", "--help").stdout
    wrong = trimtab("plan", "--json", "--seed", "x")
    assert wrong.returncode == 2
    assert "seed" in wrong.stderr
