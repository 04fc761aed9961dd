"""`trimtab config-schema`: prints the JSON schema of the settings. Nothing else."""

from __future__ import annotations

import json

import typer


def config_schema() -> None:
    """Print the settings as JSON schema, for editors and checkers."""
    from trimtab.config import config_schema as schema

    typer.echo(json.dumps(schema(), indent=2, ensure_ascii=False))
