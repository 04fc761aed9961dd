"""Settings that a slip or somebody's malice made: nested, unfolding, huge, of wrong names; each told, none costly."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config import load_config
from trimtab.config.keys import bounds, kinds, settings
from trimtab.config.problems import ConfigError

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: " + "[" * 5000, "nested deeper"),
        ("a: " + "{a: " * 5000, "nested deeper"),
        ("".join(" " * n + "a:\n" for n in range(300)), "nested deeper"),
        (BOMB, "unfold to more than"),
        (MERGES, "unfold to more than"),
        ("samples: {prompts: [" + "p, " * 30_000 + "]}", "more than 20,000 values"),
        ("training: {<<: 3}\n", "cannot be read"),
        ("model: !!python/object/apply:os.system [echo]\n", "cannot be read"),
        ("seed: !!int\n", "cannot be read"),
        ("training: {batch_size: " + "9" * 400 + "}\n", "bits"),
        ("seed: 0x" + "f" * 9000 + "\n", "bits"),
        ("recipe: grpo\ngrpo: {reward: {length: .nan}}\n", "not finite"),
    ],
)
def test_a_hostile_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_config(path, [])


@pytest.mark.parametrize(
    "word", ["samples.prompts=" + "[" * 3000, "lora={a: " * 2000, "data.columns=" + "{a: " * 2000]
)
def test_a_hostile_override_is_told(word: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, [word])


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ('output_dir="a\\0b"', "holds '.x00'"),
        ("data.source=a\udcffb", "holds '.udcff'"),
        ("output_dir=''", "must not be empty"),
    ],
)
def test_a_text_that_no_path_can_be_is_told(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(None, [word])


def test_unknown_keys_without_end_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"unknown_{n}: {n}\n" for n in range(2000)))
    with pytest.raises(ConfigError) as raised:
        load_config(path, [])
    assert len(raised.value.problems) == 2000
    assert str(raised.value).count("\n") < 200
    assert "and 1,950 more" in str(raised.value)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer=adamm", "did you mean adamw_torch"),
        ("attn_implementation=spda", "did you mean sdpa"),
        ("report_to=wandbb", "did you mean wandb"),
        ("attn_implementation=somebody/kernel", "code that would be fetched"),
    ],
)
def test_a_librarys_names_are_known(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(None, [word])


NUMBERS = [key for key in settings() if kinds(key) & {"integer", "number"}]


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_is_bounded(key: str) -> None:
    form = bounds(key)
    assert {"maximum", "exclusiveMaximum"} & form.keys()
    assert {"minimum", "exclusiveMinimum"} & form.keys()
    for value in ("1e300", "-1e300", "9" * 30, ".nan", "true"):
        with pytest.raises(ConfigError):
            load_config(None, [f"{key}={value}"])
