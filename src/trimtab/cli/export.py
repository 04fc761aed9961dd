"""`trimtab export RUN --to merged|gguf|ollama`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.cli.arguments import Trusted
from trimtab.errors import RequestError


def export(
    run: Annotated[
        Path, typer.Argument(help="The run folder that `trimtab train` made.", show_default=False)
    ],
    to: Annotated[
        Literal["merged", "gguf", "ollama"],
        typer.Option(help="A transformers folder, one GGUF file, or a GGUF with a Modelfile."),
    ],
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"] | None,
        typer.Option(help="Number format. Without it: f16 for GGUF, the base model's own for merged."),
    ] = None,
    adapter_only: Annotated[
        bool,
        typer.Option("--adapter-only", help="With --to gguf: the LoRA alone, to load over the base model."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; RUN/export/KIND without it.")] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model, in the file and in Ollama; the run's without it."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System text for the Modelfile.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature for the Modelfile.", min=0.0)] = None,
    num_ctx: Annotated[int | None, typer.Option(help="Context length for the Modelfile.", min=1)] = None,
    create: Annotated[
        bool, typer.Option(help="With --to ollama: run `ollama create` when ollama is installed.")
    ] = True,
    trust: Trusted = None,
) -> None:
    """Write what a run made in the form that others use: merged weights, GGUF, or a model for Ollama."""
    from trimtab.export import export_run

    if adapter_only and to != "gguf":
        raise RequestError.of(
            f"--adapter-only with --to {to}", "only a GGUF file can hold the adapter alone", "use --to gguf"
        )
    if to != "ollama" and (system is not None or temperature is not None or num_ctx is not None):
        raise RequestError.of(
            f"--system, --temperature or --num-ctx with --to {to}",
            "they belong to a Modelfile",
            "use --to ollama",
        )
    result = export_run(
        run,
        "adapter-gguf" if adapter_only else to,
        dtype=dtype,
        out=out,
        name=name,
        system=system,
        temperature=temperature,
        num_ctx=num_ctx,
        create=create,
        trusted=trust or [],
        say=lambda text: typer.echo(text, err=True),
    )
    for line in result.lines():
        typer.echo(line)
