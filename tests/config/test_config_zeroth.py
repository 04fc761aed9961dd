"""The zeroth section: what must be said, what contradicts, what has no effect, and the recipe's own defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config import Config, ConfigError, config_warnings, dump_config, load_config, load_request
from trimtab.config.defaults import with_recipe_defaults
from trimtab.config.schema import ZerothSettings

TASK = ["recipe=zeroth_order", "zeroth.task=sst2"]


def problems(*settings: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as refused:
        load_config(None, settings)
    return {problem.key: problem.reason for problem in refused.value.problems}


def test_both_spellings_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        'recipe: zeroth-order\nzeroth: {template: "{a}", labels: {0: x, true: y}}\n'
    )
    config = load_config(tmp_path / "c.yaml", [])
    assert config.recipe == "zeroth_order"
    assert config.zeroth.labels == {"0": "x", "True": "y"}


def test_templates_may_be_written_bare_on_the_command_line() -> None:
    config = load_config(
        None, ["recipe=zeroth_order", "zeroth.template={sentence} It was", 'zeroth.labels={0: " a", 1: " b"}']
    )
    assert config.zeroth.template == "{sentence} It was"
    assert config.zeroth.labels == {"0": " a", "1": " b"}


def test_what_is_scored_must_be_said_once() -> None:
    assert "zeroth.task" in problems("recipe=zeroth_order")
    assert "zeroth.template" in problems("recipe=zeroth_order", "zeroth.template=x")
    assert "zeroth.task" in problems(*TASK, "zeroth.template=x", "zeroth.answer=y")
    both = problems(
        "recipe=zeroth_order", "zeroth.template=x", "zeroth.answer=y", "zeroth.labels={0: a, 1: b}"
    )
    assert "zeroth.template" in both
    assert "zeroth.labels" in problems(
        "recipe=zeroth_order", "zeroth.template=x", "zeroth.labels={0: a, 1: a}"
    )


def test_every_problem_is_in_one_report() -> None:
    found = problems(
        "recipe=zeroth_order", "zeroth.eps=-1", "zeroth.method=adam", "sharding=true", "zeroth.querys=3"
    )
    assert set(found) == {"zeroth.eps", "zeroth.method", "sharding", "zeroth.querys", "zeroth.task"}


def test_settings_without_effect_are_warned_of() -> None:
    def warned(*more: str) -> str:
        return "\n".join(config_warnings(load_config(None, [*TASK, *more])))

    assert "training.max_grad_norm has no effect with recipe: zeroth_order;" in warned(
        "training.max_grad_norm=2"
    )
    assert "zeroth.interval has no effect with zeroth.method: fzoo" in warned(
        "zeroth.method=fzoo", "zeroth.interval=9"
    )
    assert "zeroth.queries" in warned("zeroth.method=mezo", "zeroth.queries=3")
    assert warned("zeroth.method=dizo", "zeroth.interval=9") == ""
    sft = config_warnings(load_config(None, ["zeroth.interval=9"]))
    assert any("zeroth has no effect with recipe: sft" in line for line in sft)


@pytest.mark.parametrize(
    ("settings", "rate", "eps"),
    [
        (["method=lora"], 1e-4, 1e-2),
        (["method=full"], 1e-6, 1e-3),
        (["method=full", "zeroth.method=fzoo"], 5e-5, 1e-4),
    ],
)
def test_defaults_of_the_recipe_come_with_their_reasons(settings: list[str], rate: float, eps: float) -> None:
    request = load_request(None, [*TASK, *settings])
    config, chosen = request.config, request.defaults
    assert (config.training.learning_rate, config.zeroth.eps) == (rate, eps)
    assert (config.training.lr_scheduler, config.training.batch_size) == ("constant", 16)
    assert config.data.source == "sample"
    assert {d.key for d in chosen} >= {"training.learning_rate", "zeroth.eps", "training.lr_scheduler"}
    assert all(d.reason for d in chosen)


def test_what_was_set_is_left_alone_and_the_kept_config_is_the_same_run(tmp_path: Path) -> None:
    words = [*TASK, "training.learning_rate=0.5", "training.batch_size=2", "data=x.jsonl"]
    request = load_request(None, words)
    config, chosen = request.config, request.defaults
    assert (config.training.learning_rate, config.training.batch_size, config.data.source) == (
        0.5,
        2,
        "x.jsonl",
    )
    assert {d.key for d in chosen} == {"zeroth.eps", "training.lr_scheduler"}
    (tmp_path / "kept.yaml").write_text(dump_config(config))
    kept = load_config(tmp_path / "kept.yaml", [])
    assert kept == config
    assert with_recipe_defaults(kept) == (kept, [])
    assert config_warnings(kept) == []


def test_how_weights_are_rounded_can_be_said() -> None:
    assert load_config(None, TASK).zeroth.rounding == "stochastic"
    assert load_config(None, [*TASK, "zeroth.rounding=nearest"]).zeroth.rounding == "nearest"
    with pytest.raises(ConfigError, match=r"zeroth\.rounding"):
        load_config(None, [*TASK, "zeroth.rounding=down"])


def test_filling_twice_is_filling_once() -> None:
    filled, chosen = with_recipe_defaults(Config(recipe="zeroth_order", zeroth=ZerothSettings(task="sst2")))
    assert len(chosen) == 5
    assert with_recipe_defaults(filled) == (filled, [])


def test_other_recipes_have_no_defaults_of_their_own() -> None:
    config = load_config(None, [])
    assert with_recipe_defaults(config) == (config, [])
