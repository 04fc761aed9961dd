"""The settings going out: a resolved config as YAML that loads back to the same, and the JSON schema for editors."""

from __future__ import annotations

from typing import Any

import yaml

from trimtab.config.checks import run_checks
from trimtab.config.facts import is_given
from trimtab.config.keys import SECTIONS, SHORTHANDS, schema_with_limits
from trimtab.config.schema import Config
from trimtab.config.secrets import refuse_secrets
from trimtab.config.yaml_text import Dumper


def dump_config(config: Config) -> str:
    """Every setting of the run as YAML; `load_config` reads it back to an equal `Config`, but for trust in code.

    A default that would read as a conflict once written down (`epochs` next to `max_steps`) stays out, and a
    comment names it. A setting that holds a secret is an error: what is written here is kept and shown.
    """
    refuse_secrets(config)
    tree = config.model_dump()
    trusted, tree["model"]["trust_remote_code"] = tree["model"]["trust_remote_code"], []
    left_out = _silent_defaults(config)
    for key in left_out:
        section, _, leaf = key.rpartition(".")
        del (tree[section] if section else tree)[leaf]
    header = "# Every setting of this run.\n"
    if trusted:
        header += (
            f"# The code of {', '.join(trusted)} was trusted by a flag, which has to be given each time.\n"
        )
    if left_out:
        header += f"# At their defaults, and without effect here: {', '.join(left_out)}\n"
    return header + yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _silent_defaults(config: Config) -> list[str]:
    all_written = Config.model_validate(config.model_dump())
    before = {finding for finding, _ in run_checks(config)}
    blamed = [finding.key for finding, _ in run_checks(all_written) if finding not in before]
    return [key for key in dict.fromkeys(blamed) if not is_given(config, key)]


def config_schema() -> dict[str, Any]:
    """The settings as JSON schema, with a description for each; sections that have a short form also take text."""
    schema = schema_with_limits()
    for name in SECTIONS:
        reference = {"$ref": f"#/$defs/{SECTIONS[name].__name__}"}
        described = {"description": schema["$defs"][SECTIONS[name].__name__]["description"]}
        form = {"anyOf": [{"type": "string"}, reference]} if name in SHORTHANDS else reference
        schema["properties"][name] = {**form, **described}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Trimtab config"}
