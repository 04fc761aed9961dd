"""The names that people know from other tools."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import Config, ConfigError, load_config
from trimtab.config.aliases import ALIASES, DENIALS, SECTION_ALIASES
from trimtab.config.elsewhere import ELSEWHERE
from trimtab.config.keys import SECTIONS, settings


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def value_of(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def refusal(*overrides: str) -> tuple[str, str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    (problem,) = caught.value.problems
    return problem.key, problem.reason, problem.change


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("model_name_or_path=a/b", "model.name", "a/b"),
        ("base_model=a/b", "model.name", "a/b"),
        ("model_name=a/b", "model.name", "a/b"),
        ("trust_remote_code=smollm2", "model.trust_remote_code", ["smollm2"]),
        ("attn_implementation=eager", "model.attn_implementation", "eager"),
        ("output_dir=runs/a", "output_dir", "runs/a"),
        ("overwrite_output_dir=true", "overwrite", True),
        ("per_device_train_batch_size=3", "training.batch_size", 3),
        ("train_batch_size=3", "training.batch_size", 3),
        ("micro_batch_size=3", "training.batch_size", 3),
        ("per_device_eval_batch_size=3", "training.eval_batch_size", 3),
        ("num_train_epochs=2", "training.epochs", 2.0),
        ("num_epochs=2", "training.epochs", 2.0),
        ("learning_rate=1e-4", "training.learning_rate", 1e-4),
        ("lr=1e-4", "training.learning_rate", 1e-4),
        ("training.lr=1e-4", "training.learning_rate", 1e-4),
        ("lr_scheduler_type=linear", "training.lr_scheduler", "linear"),
        ("warmup_ratio=0.1", "training.warmup_ratio", 0.1),
        ("warmup_steps=7", "training.warmup_steps", 7),
        ("warmup_steps=0.1", "training.warmup_ratio", 0.1),
        ("weight_decay=0.1", "training.weight_decay", 0.1),
        ("max_grad_norm=0.5", "training.max_grad_norm", 0.5),
        ("optim=adafactor", "training.optimizer", "adafactor"),
        ("gradient_checkpointing=true", "training.gradient_checkpointing", True),
        ("gradient_accumulation_steps=4", "training.gradient_accumulation_steps", 4),
        ("max_steps=9", "training.max_steps", 9),
        ("max_steps=-1", "training.max_steps", None),
        ("eval_steps=9", "training.eval_steps", 9),
        ("save_steps=9", "training.save_steps", 9),
        ("save_total_limit=9", "training.save_total_limit", 9),
        ("logging_steps=9", "training.logging_steps", 9),
        ("load_best_model_at_end=false", "training.keep_best", False),
        ("dataloader_num_workers=2", "training.dataloader_workers", 2),
        ("resume_from_checkpoint=runs/a/c", "training.resume", "runs/a/c"),
        ("resume_from_checkpoint=null", "training.resume", False),
        ("group_by_length=true", "training.group_by_length", True),
        ("train_sampling_strategy=group_by_length", "training.group_by_length", True),
        ("report_to=none", "monitor.report_to", []),
        ("report_to=wandb", "monitor.report_to", ["wandb"]),
        ("report_to=[wandb, mlflow]", "monitor.report_to", ["wandb", "mlflow"]),
        ("monitor.report_to=tensorboard", "monitor.report_to", ["tensorboard"]),
        ("training.seed=5", "seed", 5),
        ("lora_r=4", "lora.r", 4),
        ("lora_rank=4", "lora.r", 4),
        ("lora.rank=4", "lora.r", 4),
        ("lora.lora_alpha=4", "lora.alpha", 4),
        ("lora_dropout=0.1", "lora.dropout", 0.1),
        ("lora_target_modules=[q_proj]", "lora.targets", ["q_proj"]),
        ("target_modules=all-linear", "lora.targets", "all-linear"),
        ("lora_target=all", "lora.targets", "all-linear"),
        ("lora_target=q_proj,v_proj", "lora.targets", ["q_proj", "v_proj"]),
        ("use_lora=false", "method", "full"),
        ("finetuning_type=full", "method", "full"),
        ("dataset_name=a/b", "data.source", "a/b"),
        ("dataset=a/b", "data.source", "a/b"),
        ("train_file=a.json", "data.source", "a.json"),
        ("validation_file=a.json", "data.eval_source", "a.json"),
        ("dataset_text_field=body", "data.columns", {"text": "body"}),
        ("max_seq_length=99", "data.max_length", 99),
        ("max_length=99", "data.max_length", 99),
        ("training.max_length=99", "data.max_length", 99),
        ("cutoff_len=99", "data.max_length", 99),
        ("sequence_len=99", "data.max_length", 99),
        ("max_samples=99", "data.max_rows", 99),
        ("val_size=0.2", "data.eval_fraction", 0.2),
        ("test_size=0.2", "data.eval_fraction", 0.2),
        ("validation_split_percentage=5", "data.eval_fraction", 0.05),
        ("packing=true", "data.packing", True),
        ("sample_packing=true", "data.packing", True),
        ("train_on_inputs=true", "data.train_on", "all"),
        ("train_on_inputs=false", "data.train_on", "answers"),
        ("completion_only_loss=false", "data.train_on", "all"),
        ("bf16=true", "precision", "bf16"),
        ("bf16=false", "precision", "fp32"),
        ("bf16=auto", "precision", "auto"),
        ("fp16=true", "precision", "fp16"),
        ("fp16=false", "precision", "fp32"),
        ("train_sampling_strategy=random", "training.group_by_length", False),
        ("fp32=true", "precision", "fp32"),
        ("training.bf16=true", "precision", "bf16"),
        ("torch_dtype=torch.float16", "precision", "fp16"),
        ("mixed_precision=no", "precision", "fp32"),
        ("use_cpu=true", "device", "cpu"),
        ("no_cuda=true", "device", "cpu"),
        ("no_cuda=false", "device", "auto"),
        ("use_mps_device=true", "device", "mps"),
        ("use_model_parallel=False", "model_parallel", False),
        ("use_model_parallel=None", "model_parallel", None),
        ("eval_strategy=epoch", "training.eval_steps", None),
    ],
)
def test_aliases(word: str, key: str, value: object) -> None:
    found = value_of(load_config(None, [word]), key)
    assert (found, type(found)) == (value, type(value))


SEED = """\
device: cpu
output_dir: out
num_train_epochs: 3
per_device_train_batch_size: 2
per_device_eval_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 2e-4
weight_decay: 0.01
warmup_steps: 100
max_grad_norm: 1.0
optim: adamw_torch
lr_scheduler_type: cosine
dataloader_num_workers: 0
fp16: false
bf16: false
logging_steps: 10
eval_steps: 50
save_steps: 100
evaluation_strategy: steps
save_total_limit: 3
no_cuda: true
use_mps_device: false
report_to: none
seed: 42
remove_unused_columns: false
push_to_hub: false
load_best_model_at_end: true
metric_for_best_model: eval_loss
"""


def test_a_flat_file_of_training_arguments(tmp_path: Path) -> None:
    config = load(tmp_path, SEED)
    assert (config.device, config.precision, config.seed) == ("cpu", "fp32", 42)
    assert (config.training.eval_steps, config.training.save_steps) == (50, 100)
    assert (config.training.batch_size, config.training.learning_rate) == (2, 2e-4)
    assert config.monitor.report_to == []


def test_two_names_with_one_value_agree(tmp_path: Path) -> None:
    assert load(tmp_path, "lr: 1e-4\ntraining: {learning_rate: 0.0001}\n").training.learning_rate == 1e-4


def test_two_names_with_two_values_contradict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "lr: 1e-4\ntraining:\n  learning_rate: 2e-4\n")
    (problem,) = caught.value.problems
    assert problem.key == "training.learning_rate"
    assert problem.origin is not None
    assert problem.origin.line == 3
    assert problem.reason.startswith("contradicts lr = 0.0001 (")
    assert "run.yaml:1" in problem.reason


@pytest.mark.parametrize(
    ("words", "key", "other"),
    [
        ("bf16=true fp16=true", "fp16", "bf16 = true"),
        ("precision=bf16 bf16=false", "bf16", "precision = "),
        ("use_cpu=true device=cuda", "device", "use_cpu = true"),
        ("model=a base_model=b", "base_model", 'model = "a"'),
        ("eval_strategy=epoch eval_steps=5", "eval_steps", 'eval_strategy = "epoch"'),
    ],
)
def test_contradictions(words: str, key: str, other: str) -> None:
    where, reason, _ = refusal(*words.split())
    assert where == key
    assert f"contradicts {other}" in reason


@pytest.mark.parametrize(
    ("text", "word", "key", "value"),
    [
        ("lr: 1e-4", "training.learning_rate=1e-3", "training.learning_rate", 1e-3),
        ("training: {learning_rate: 1e-4}", "lr=1e-3", "training.learning_rate", 1e-3),
        ("bf16: true", "precision=fp32", "precision", "fp32"),
        ("bf16: true", "fp16=true", "precision", "fp16"),
        ("fp16: true", "fp16=false", "precision", "fp32"),
        ("precision: fp16", "fp16=false", "precision", "fp32"),
        ("precision: auto", "fp16=false", "precision", "fp32"),
        ("bf16: false", "precision=auto", "precision", "auto"),
        ("precision: bf16", "bf16=false", "precision", "fp32"),
        ("fp16: true", "bf16=false", "precision", "fp16"),
        ("device: cpu", "use_cpu=false", "device", "auto"),
        ("device: cpu\nno_cuda: false", "seed=1", "device", "cpu"),
        ("dataset_name: a", "data=b", "data.source", "b"),
        ("eval_steps: 5", "eval_strategy=epoch", "training.eval_steps", None),
    ],
)
def test_the_command_line_wins_under_any_name(
    tmp_path: Path, text: str, word: str, key: str, value: object
) -> None:
    assert value_of(load(tmp_path, text, word), key) == value


@pytest.mark.parametrize(
    ("word", "reason", "change"),
    [
        ("evaluation_strategy=no", "evaluates whenever", "data.eval_fraction: 0"),
        ("eval_strategy=steps", "does not say how often", "add training.eval_steps: N"),
        ("eval_strategy=often", "must be steps or epoch", "write epoch"),
        ("save_strategy=no", "always keeps its newest", "training.save_total_limit: 1"),
        ("val_size=100", "is a number of rows", "a share below 1"),
        ("report_to=all", "only to trackers that are named", "name them"),
        ("bf16=3", "must be true or false", "precision: bf16"),
        (
            "train_sampling_strategy=[a]",
            "must be random or group_by_length",
            "group_by_length: true or false",
        ),
        ("use_lora=3", "must be true or false", "method: lora or method: full"),
        ("torch_dtype=int8", "has no counterpart", "precision: auto or fp32"),
        ("adapter=ia3", "has no counterpart", "method: lora"),
        ("deepspeed=zero3.json", "is not a Trimtab setting", "sharding: true"),
        ("load_in_8bit=true", "is not a Trimtab setting", "model.quantize: nf4"),
        ("push_to_hub=true", "is not a Trimtab setting", "nothing is uploaded"),
        ("training.torch_compile_mode=max-autotune", "is not a Trimtab setting", "remove it"),
        ("lora.use_qalora=true", "is not a Trimtab setting", "lora.r"),
        ("metric_for_best_model=accuracy", "is not a Trimtab setting", "lowest held-out loss"),
        ("device_map=auto", "is not a Trimtab setting", "model_parallel: true"),
    ],
)
def test_names_and_values_without_a_counterpart(word: str, reason: str, change: str) -> None:
    key, why, out = refusal(word)
    assert key == word.partition("=")[0]
    assert reason in why
    assert change in out


def test_saving_once_an_epoch_while_evaluating_more_often() -> None:
    key, reason, _ = refusal("save_strategy=epoch", "eval_steps=5")
    assert (key, "training.eval_steps" in reason) == ("save_strategy", True)


@pytest.mark.parametrize(
    "word",
    [
        "push_to_hub=false",
        "do_train=true",
        "hub_token=null",
        "load_in_4bit=false",
        "lora.bias=none",
        "tf32=null",
    ],
)
def test_what_asks_for_nothing_is_let_through(word: str) -> None:
    assert load_config(None, [word]) == Config()


@pytest.mark.parametrize(
    "word", ["lora_target_modules=null", "dataset_name=null", "num_train_epochs=null", "bf16=null"]
)
def test_null_under_a_foreign_name_is_not_set(word: str) -> None:
    assert load_config(None, [word]) == Config()


def test_the_tables_name_settings_that_exist_and_do_not_overlap() -> None:
    targets = {alias.key for alias in ALIASES.values()} | {denial.key for denial in DENIALS.values()}
    targets |= {key for names in SECTION_ALIASES.values() for key in names.values()}
    assert targets <= set(settings())
    assert not set(ALIASES) & set(ELSEWHERE)
    assert not set(ELSEWHERE) & ({*settings()} | {*SECTIONS})
    assert set(DENIALS) <= set(ALIASES)


@pytest.mark.slow
def test_every_name_of_the_hugging_face_trainers_is_known() -> None:
    from trl import ModelConfig, ScriptArguments, SFTConfig

    names = {
        field.name for kind in (SFTConfig, ModelConfig, ScriptArguments) for field in dataclasses.fields(kind)
    }
    assert names - set(ALIASES) - set(ELSEWHERE) - set(settings()) == set()
