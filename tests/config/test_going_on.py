"""Every setting has a class that says what a change of it means for a run that goes on."""

from __future__ import annotations

from collections import Counter

from trimtab.config import Config, load_config
from trimtab.config.going_on import _BY_CLASS, CHANGES, change_of
from trimtab.config.keys import settings


def test_every_setting_of_the_schema_is_in_one_class() -> None:
    listed = Counter(key for keys in _BY_CLASS.values() for key in keys.split())
    assert settings().keys() - listed.keys() == set(), (
        "say in config/going_on.py what a change of these means"
    )
    assert listed.keys() - settings().keys() == set(), "no such settings"
    assert {key for key, count in listed.items() if count > 1} == set()


def test_a_setting_in_no_class_counts_as_one_that_makes_another_run() -> None:
    assert "training.not_sorted_yet" not in CHANGES
    assert change_of("training.not_sorted_yet", Config(), Config()) == "kept"


def test_what_does_not_reach_a_run_may_change() -> None:
    sft, full = load_config(None, []), load_config(None, ["method=full"])
    vision = load_config(None, ["recipe=vision"])
    shirg = load_config(None, ["recipe=vision", "vision.views=shirg"])
    steps = load_config(None, ["training.max_steps=3"])
    assert change_of("grpo.beta", sft, sft) == "free"
    assert change_of("lora.r", full, full) == "free"
    assert change_of("lora.r", full, sft) == "kept"
    assert change_of("shirg.keep", vision, vision) == "free"
    assert change_of("shirg.keep", shirg, shirg) == "kept"
    assert change_of("data.packing", vision, vision) == "free"
    assert change_of("data.packing", sft, sft) == "kept"
    assert change_of("training.epochs", steps, steps) == "free"
    assert change_of("training.epochs", sft, sft) == "length"
