"""`export_run`: what a finished run made, in the form that others use. Never changes the run itself."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError, TrimtabError
from trimtab.export.codec_files import keep_codec
from trimtab.export.files import MARK, check_free, check_replaceable, claim_file, readable_size
from trimtab.export.finished import (
    FinishedRun,
    base_name,
    license_of,
    model_config,
    read_run,
    run_processor,
    run_tokenizer,
    through_chat_template,
)
from trimtab.files import write_whole
from trimtab.models.families import AUDIO, CAUSAL_LM
from trimtab.recipes.run_lock import refuse_if_running, running_in
from trimtab.recipes.run_mark import claim
from trimtab.recipes.table import recipe_of
from trimtab.shortage import refusals_told

if TYPE_CHECKING:
    from trimtab.config import Config

KINDS = ("merged", "gguf", "adapter-gguf", "ollama")
MERGING = "merging the adapter into the base model (fp32, on the CPU)"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written, and what the user should know of it."""

    kind: str
    folder: Path
    files: list[Path]
    notes: list[str] = field(default_factory=list)
    command: str | None = None
    """The `ollama create` command, for kind ollama."""
    created: bool = False
    """Whether that command was run."""

    def lines(self) -> list[str]:
        """Text to print."""
        out = [f"{file}  {readable_size(file.stat().st_size)}" for file in self.files]
        out += [f"note: {note}" for note in self.notes]
        if self.command:
            how = "made with" if self.created else "where Ollama is installed, run"
            out.append(f"{how}: {self.command}")
        return out


def check_export(config: Config) -> None:
    """Refuse what `export` asks for where it cannot come about, from the settings and the base model's config alone."""
    from trimtab.export import ollama
    from trimtab.export.gguf_model import shape_of
    from trimtab.export.weights import read_config

    check_kind(config, config.export.to or "merged")
    if config.export.to == "merged":
        return
    if config.export.name is not None and config.export.to == "ollama":
        ollama.check_name(config.export.name)
    shape_of(read_config(config.model))


def check_kind(config: Config, to: str) -> None:
    """Refuse a form that has no room for all of the model."""
    family = recipe_of(config).family
    if to == "merged" or family is CAUSAL_LM:
        return
    raise RequestError.of(
        f"--to {to} of a run with recipe: {config.recipe}",
        f"a GGUF that Trimtab writes holds a language model alone, and this is an {family.name}: the rest of it would "
        "be lost, and what was trained there",
        "use --to merged: a folder that transformers loads",
    )


def export_as_asked(config: Config, say: Say) -> ExportResult:
    """The export that the config of a run asks for, once the run is kept. That stays whole if the export fails."""
    wanted = config.export
    assert wanted.to is not None
    assert config.output_dir is not None
    folder, trusted = Path(config.output_dir).expanduser(), config.model.trust_remote_code
    try:
        with refusals_told():
            return export_run(
                folder, wanted.to, dtype=wanted.dtype, name=wanted.name, trusted=trusted, say=say
            )
    except (TrimtabError, OSError) as error:
        again = ["trimtab", "export", str(folder), "--to", wanted.to]
        again += ["--dtype", wanted.dtype] if wanted.dtype else []
        again += ["--name", wanted.name] if wanted.name else []
        again += [f"--trust-remote-code={place}" for place in trusted]
        raise TrimtabError(
            f"the run is finished and kept in {folder}, but its export failed: {error}\n"
            f"  once that is mended: {shlex.join(again)}"
        ) from error


def export_run(
    run_dir: Path,
    to: str,
    *,
    dtype: str | None = None,
    out: Path | None = None,
    name: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    num_ctx: int | None = None,
    create: bool = True,
    trusted: Sequence[str] = (),
    say: Say | None = None,
) -> ExportResult:
    """Export a finished run.

    `to` is `merged` (a transformers folder), `gguf` (one file), `adapter-gguf` (the LoRA alone) or `ollama` (file and
    Modelfile). `dtype` is f32, f16, bf16 or q8_0; without it a GGUF is f16 and a merged model keeps its base's.
    """
    if to not in KINDS:
        raise RequestError.of(f"--to {to}", "there is no such export", f"take one of {', '.join(KINDS)}")
    run = read_run(Path(run_dir))
    run.config.model.trust_remote_code = list(trusted)
    check_kind(run.config, to)
    folder = Path(out) if out is not None else run.folder / "export" / to
    say = say or _silent
    if out is None:
        refuse_if_running(run.folder, "export")
        claim(run.folder, "export")
    elif (holder := running_in(run.folder)) is not None:
        say(f"! a run is going on in {run.folder} ({holder}): this is what it had kept before")
    if to == "merged":
        return _merged(run, folder, dtype, say)
    if to == "adapter-gguf":
        return _adapter(run, folder, dtype or "f16", name, say)
    if to == "gguf":
        return _gguf(run, folder, f"model-{dtype or 'f16'}.gguf", dtype or "f16", name, say)
    told = {"system": system, "temperature": temperature}
    return _ollama(run, folder, dtype or "f16", name, say, create, num_ctx, **told)


def _merged(run: FinishedRun, folder: Path, dtype: str | None, say: Say) -> ExportResult:
    from trimtab.export import weights

    weights.check_merged_dtype(dtype)
    check_replaceable(folder)
    if not run.lora and dtype is None:
        say("copying the tuned model")
        weights.copy_model(folder, run.weights, partial(_keep_beside, run))
    else:
        say(MERGING if run.lora else f"converting the tuned model to {dtype}")
        model, stored = weights.tuned_model(run.config, run.weights, progress=say is not _silent)
        weights.save_merged(
            folder,
            model,
            run_processor(run),
            dtype=dtype,
            stored=stored,
            beside=partial(_keep_beside, run),
        )
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MARK)
    return ExportResult(kind="merged", folder=folder, files=files)


def _keep_beside(run: FinishedRun, folder: Path) -> None:
    if recipe_of(run.config).family is AUDIO:
        keep_codec(run.config, run.folder, folder)


def _gguf(run: FinishedRun, folder: Path, file: str, dtype: str, name: str | None, say: Say) -> ExportResult:
    from trimtab.export import weights
    from trimtab.export.gguf_model import shape_of, write_model
    from trimtab.export.gguf_vocab import read_vocab
    from trimtab.export.tensors import check_format

    # Everything that can be refused is refused before weights are read.
    target = folder / file
    check_format(dtype)
    check_free(target)
    config = model_config(run)
    shape_of(config)
    vocab = read_vocab(run_tokenizer(run))
    if run.lora:
        say(MERGING)
        model, _ = weights.tuned_model(run.config, run.weights, progress=say is not _silent)
        entries = weights.model_entries(model)
    else:
        entries = weights.folder_entries(run.weights)
    say(f"writing {target} ({dtype})")
    claim_file(target)
    notes = write_model(
        target,
        config,
        entries,
        vocab,
        dtype=dtype,
        name=name or run.folder.resolve().name,
        base_model=base_name(run),
        license_name=license_of(run),
        progress=say is not _silent,
    )
    return ExportResult(kind="gguf", folder=folder, files=[target], notes=vocab.notes + notes)


def _adapter(run: FinishedRun, folder: Path, dtype: str, name: str | None, say: Say) -> ExportResult:
    from trimtab.export.gguf_adapter import write_adapter

    if not run.lora:
        raise RequestError.of(
            f"{run.folder}: method full has no adapter", "all weights were tuned", "leave --adapter-only out"
        )
    target = folder / f"adapter-{dtype}.gguf"
    claim_file(target)
    say(f"writing {target}")
    notes = write_adapter(
        target,
        run.weights,
        model_config(run),
        dtype=dtype,
        name=name or run.folder.resolve().name,
        base_model=base_name(run),
        progress=say is not _silent,
    )
    notes.append(
        f"load it over a GGUF of the base model, {base_name(run)}: `llama-server -m BASE.gguf --lora {target.name}`"
    )
    return ExportResult(kind="adapter-gguf", folder=folder, files=[target], notes=notes)


def _ollama(
    run: FinishedRun,
    folder: Path,
    dtype: str,
    name: str | None,
    say: Say,
    create: bool,
    num_ctx: int | None,
    **told: Any,
) -> ExportResult:
    """`told`: what else the Modelfile says."""
    from trimtab.export import ollama
    from trimtab.export.chat_template import ollama_chat, plain_text

    name = name or ollama.model_name(run.folder.resolve().name)
    ollama.check_name(name)
    chat = (ollama_chat if through_chat_template(run) else plain_text)(run_tokenizer(run))
    longest = model_config(run).max_position_embeddings
    if num_ctx is not None and not 0 < num_ctx <= longest:
        raise RequestError.of(
            f"num_ctx {num_ctx}", f"the model was made for 1 to {longest} tokens", "choose within"
        )
    context = num_ctx or min(longest, ollama.DEFAULT_CONTEXT)
    text = ollama.modelfile("model.gguf", chat, num_ctx=context, license_name=license_of(run), **told)
    written = folder / "Modelfile"
    check_free(written)
    made = _gguf(run, folder, "model.gguf", dtype, name, say)
    claim_file(written)
    write_whole(written, text)
    created = create and ollama.create(folder, name, say)
    return ExportResult(
        kind="ollama",
        folder=folder,
        files=[*made.files, written],
        notes=made.notes + chat.notes,
        command=shlex.join(ollama.create_command(folder, name)),
        created=created,
    )


def _silent(text: str) -> None:
    del text
