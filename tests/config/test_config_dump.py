"""The resolved config as YAML, and the JSON schema."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from trimtab.config import Config, config_schema, config_warnings, dump_config, load_config
from trimtab.config.checks import run_checks
from trimtab.config.defaults import with_recipe_defaults
from trimtab.config.keys import SECTIONS, schema_with_limits
from trimtab.config.library_names import names_for
from trimtab.config.schema import DataSettings, LoraSettings, ModelSettings, SampleSettings, TrainingSettings

TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20
) | st.sampled_from(
    [
        "null",
        "None",
        "1e-4",
        "1_000",
        "0x1F",
        ".5",
        "no",
        "~",
        "2024-01-01",
        "<<",
        "=",
        "a: b",
        "#x",
        " a\n b\n",
        "[a",
        "-",
    ]
)
NAMES = TEXTS.filter(bool)


def reload(text: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(text, encoding="utf-8", newline="")
        return load_config(path, [])


def from_form(form: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a setting's JSON schema allows; new settings are covered without a change here."""
    if "$ref" in form:
        return section(defs[form["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in form:
        return st.one_of(*(from_form(choice, defs) for choice in form["anyOf"]))
    if "enum" in form:
        return st.sampled_from(form["enum"])
    if "const" in form:
        return st.just(form["const"])
    if "pattern" in form:
        return st.sampled_from(["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:12"])
    kind = form["type"]
    if kind == "integer":
        return st.integers(form.get("minimum", 0), form.get("maximum", 10**6))
    if kind == "number":
        low, above = form.get("minimum"), form.get("exclusiveMinimum")
        high, below = form.get("maximum"), form.get("exclusiveMaximum")
        lowest = above if low is None else low
        highest = below if high is None else high
        return st.floats(
            lowest,
            highest,
            exclude_min=low is None and above is not None,
            exclude_max=high is None and below is not None,
            allow_infinity=False,
        )
    if kind == "array":
        words = form.get("items", {}).get("enum")
        return st.lists(TEXTS if words is None else st.sampled_from(words), max_size=3)
    if kind == "object":
        inner = form.get("additionalProperties", {}).get("type")
        return st.dictionaries(NAMES, st.floats(-9, 9) if inner == "number" else TEXTS, max_size=3)
    texts = TEXTS.filter(lambda text: len(text) >= form.get("minLength", 0))
    return {"string": texts, "boolean": st.booleans(), "null": st.none()}[kind]


LISTED = {
    "trust_remote_code": st.just([]),  # which no file keeps
    "report_to": st.lists(st.sampled_from(names_for("monitor.report_to")), max_size=3),
    "optimizer": st.sampled_from(names_for("training.optimizer")),
    "attn_implementation": st.none() | st.sampled_from(names_for("model.attn_implementation")),
}
"""Settings that take the names of a library's list."""


def section(form: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            name: LISTED.get(name) or from_form(inner, defs) for name, inner in form["properties"].items()
        },
    )


SCHEMA = schema_with_limits()


def loads_back_equal(tree: dict[str, Any]) -> None:
    config, _ = with_recipe_defaults(Config.model_validate(tree))
    assume(not [finding for finding, _ in run_checks(config) if not finding.warning])
    again = reload(dump_config(config))
    assert again == config
    assert config_warnings(again) == config_warnings(config)


@settings(deadline=None, database=None, max_examples=40)
@given(section(SCHEMA, SCHEMA["$defs"]))
@example({"training": {"max_steps": 5}})
@example({"training": {"warmup_steps": 5}})
@example({"training": {"save_steps": 7}})
@example({"data": {"eval_fraction": 0.0}})
@example({"data": {"eval_source": "b.json"}})
@example({"method": "full"})
@example({"samples": {"prompts": ["\x85", "a\u2028b", "\r\n", "\ufeff", "\x00"]}})
@example({"training": {"resume": "true"}, "model": {"name": "1e-4"}})
def test_a_dumped_config_loads_back_equal(tree: dict[str, Any]) -> None:
    loads_back_equal(tree)


@pytest.mark.slow
@settings(deadline=None, database=None, max_examples=400)
@given(section(SCHEMA, SCHEMA["$defs"]))
def test_many_dumped_configs_load_back_equal(tree: dict[str, Any]) -> None:
    loads_back_equal(tree)


def test_the_dump_holds_every_setting() -> None:
    assert yaml.safe_load(dump_config(Config())) == Config().model_dump()


def test_a_default_that_would_read_as_a_conflict_is_named_in_a_comment() -> None:
    text = dump_config(load_config(None, ["training.max_steps=5", "training.warmup_steps=2"]))
    assert "without effect here: training.warmup_ratio, training.epochs\n" in text
    assert "epochs" not in yaml.safe_load(text)["training"]


def test_the_dump_of_a_config_that_code_has_changed() -> None:
    config = Config()
    config.output_dir = "runs/a"
    config.training.epochs = 1.0
    assert reload(dump_config(config)) == config


def test_every_setting_has_a_description() -> None:
    schema = config_schema()
    forms = {"": schema, **schema["$defs"]}
    bare = [
        f"{where}.{name}"
        for where, form in forms.items()
        for name, inner in form["properties"].items()
        if not inner.get("description")
    ]
    assert bare == []


def test_the_schema_is_a_json_schema_and_takes_the_defaults() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (extra `dev`)")
    schema = json.loads(json.dumps(config_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for accepted in (
        {},
        Config().model_dump(),
        {"model": "smollm2", "data": "rows.json"},
        {"data": {"max_rows": 3}},
    ):
        assert validator.is_valid(accepted), accepted
    for refused in ({"modle": "x"}, {"training": "fast"}, {"lora": {"r": 0}}, {"model": 5}):
        assert not validator.is_valid(refused), refused


def test_sections_of_the_schema_are_those_of_the_config() -> None:
    assert SECTIONS["model"] is ModelSettings
    assert {ModelSettings, DataSettings, LoraSettings, TrainingSettings, SampleSettings} <= set(
        SECTIONS.values()
    )


def test_the_verb_prints_the_schema() -> None:
    import typer

    from trimtab.cli.config_schema import config_schema as verb

    app = typer.Typer()
    app.command()(verb)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    assert json.loads(done.output) == config_schema()


@pytest.mark.parametrize("short", ["model", "data"])
def test_short_forms_are_in_the_schema(short: str) -> None:
    assert {"type": "string"} in config_schema()["properties"][short]["anyOf"]
