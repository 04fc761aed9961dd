"""What must hold between settings."""

from __future__ import annotations

import pytest

from trimtab.config import Config, ConfigError, config_warnings, keeps_best, load_config
from trimtab.config.checks import rules_for
from trimtab.config.keys import RECIPE_SECTIONS, SECTIONS, settings


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data.packing=true training.group_by_length=true", "training.group_by_length"),
        ("training.keep_best=true data.eval_fraction=0", "training.keep_best"),
        ("training.keep_best=true training.eval_steps=20 training.save_steps=50", "training.keep_best"),
        ("training.keep_best=true training.save_steps=50", "training.keep_best"),
        ("training.warmup_steps=10 training.warmup_ratio=0.1", "training.warmup_ratio"),
        ("model_parallel=true device=cpu", "model_parallel"),
        ("model_parallel=true device=mps", "model_parallel"),
        ("model_parallel=true device=cuda:1", "model_parallel"),
        ("model_parallel=true sharding=true", "model_parallel"),
        ("model_parallel=true processes=2", "model_parallel"),
        ("processes=2 device=cuda:0", "processes"),
        ("precision=fp16 device=cpu", "precision"),
        ("fp16=true use_cpu=true", "precision"),
        ("training.resume=true overwrite=true output_dir=runs/a", "overwrite"),
        ("training.resume=true", "training.resume"),
        ("monitor.slow_after_seconds=900", "monitor.slow_after_seconds"),
        ("monitor.stuck_after_seconds=30", "monitor.slow_after_seconds"),
    ],
)
def test_conflicts(words: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, words.split())
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.origin is not None
    assert problem.change


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("method=full lora.r=8", "lora"),
        ("training.max_steps=10 training.epochs=2", "training.epochs"),
        ("training.save_steps=50", "training.keep_best"),
        ("data.eval_fraction=0 training.eval_steps=10", "training.eval_steps"),
        ("data.eval_fraction=0 training.eval_batch_size=10", "training.eval_batch_size"),
        ("data.eval_source=b.json data.eval_fraction=0.2", "data.eval_fraction"),
        ("training.lr_scheduler=constant training.warmup_steps=5", "training.warmup_steps"),
        ("training.lr_scheduler=constant training.warmup_ratio=0.1", "training.warmup_ratio"),
        ("overwrite=true", "overwrite"),
        ("data.endpoint_url=http://localhost:9000", "data.endpoint_url"),
    ],
)
def test_settings_without_effect_are_warnings(words: str, key: str) -> None:
    (warning,) = config_warnings(load_config(None, words.split()))
    assert warning.startswith(f"{key} ")


def test_rules_judge_what_the_recipe_chose_where_nobody_said() -> None:
    """GRPO evaluates by request alone, so that an evaluation's interval says nothing by itself."""
    words = "recipe=grpo reward=length training.eval_steps=5"
    (warning,) = config_warnings(load_config(None, words.split()))
    assert warning.startswith("training.eval_steps has no effect: data.eval_fraction is 0")
    assert config_warnings(load_config(None, [*words.split(), "data.eval_fraction=0.1"])) == []
    with pytest.raises(ConfigError, match=r"training\.keep_best"):
        load_config(None, ["recipe=grpo", "reward=length", "training.keep_best=true"])
    assert config_warnings(load_config(None, ["recipe=grpo", "reward=length", "training.max_steps=3"])) == []


def test_completions_leave_room_for_a_prompt() -> None:
    words = "recipe=grpo reward=length data.max_length=64 grpo.max_completion_length=64"
    with pytest.raises(ConfigError, match="none is left for a prompt"):
        load_config(None, words.split())
    load_config(None, [*words.split(), "grpo.max_prompt_length=8"])
    load_config(None, [*words.split(), "data.max_length=65"])


def test_all_that_a_recipe_does_not_use_is_named() -> None:
    words = "recipe=grpo reward=length data.packing=true data.train_on=all"
    (warning,) = config_warnings(load_config(None, words.split()))
    assert warning == "data.packing has no effect with recipe: grpo, nor have data.train_on; remove it"


@pytest.mark.parametrize(
    "words",
    [
        "",
        "data.eval_fraction=0",
        "training.max_steps=10",
        "method=full",
        "training.warmup_steps=10",
        "training.warmup_steps=10 training.warmup_ratio=0",
        "training.warmup_steps=null training.warmup_ratio=0.1",
        "training.lr_scheduler=constant",
        "training.keep_best=true training.eval_steps=20 training.save_steps=40",
        "training.keep_best=true data.eval_fraction=0 data.eval_source=b.json",
        "training.keep_best=false training.eval_steps=20 training.save_steps=50",
        "training.resume=runs/a/checkpoints/checkpoint-1",
        "model_parallel=true device=cuda",
        "model_parallel=true sharding=false processes=1",
        "model_parallel=false processes=4 sharding=true",
        "precision=bf16 device=cpu",
        "precision=fp16 device=auto",
        "overwrite=true output_dir=runs/a",
        "data=s3://bucket/rows.jsonl data.endpoint_url=http://localhost:9000",
    ],
)
def test_what_goes_together(words: str) -> None:
    assert config_warnings(load_config(None, words.split())) == []


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("", True),
        ("training.keep_best=false", False),
        ("data.eval_fraction=0", False),
        ("training.save_steps=50", False),
        ("training.save_steps=50 training.eval_steps=25", True),
    ],
)
def test_keeps_best(words: str, kept: bool) -> None:
    assert keeps_best(load_config(None, words.split())) is kept


def test_rules_name_settings_that_exist() -> None:
    known = {*settings(), *SECTIONS}
    recipes = Config.model_json_schema()["properties"]["recipe"]["enum"]
    assert {key for recipe in recipes for keys, _ in rules_for(recipe) for key in keys} <= known


def test_each_recipe_but_sft_has_a_section_of_its_own() -> None:
    recipes = Config.model_json_schema()["properties"]["recipe"]["enum"]
    assert {"sft", *(section.recipe for section in RECIPE_SECTIONS.values())} == set(recipes)
    for section in RECIPE_SECTIONS.values():
        assert set(section.without_effect) <= set(settings())
        assert len(section.rules) > 0


def test_no_rule_objects_to_the_defaults_even_when_they_are_written_down() -> None:
    assert config_warnings(Config.model_validate(Config().model_dump())) == []
