"""`trimtab speak`: a text, spoken by the model that a run kept, as a wav file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.arguments import Trusted, trust_words


def speak(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The folder of a finished run of recipe voice.", show_default=False
        ),
    ],
    text: Annotated[str, typer.Option(help="What to say.", show_default=False)],
    reference: Annotated[
        Path | None, typer.Option(help="A clip of the voice that is to say it.", show_default=False)
    ] = None,
    reference_text: Annotated[
        str | None,
        typer.Option(
            help="What is said in the clip; without it the .txt file beside it is read.", show_default=False
        ),
    ] = None,
    speaker: Annotated[
        str | None,
        typer.Option(
            help="Without a clip: a speaker of the run's own data, who is heard in one of its clips.",
            show_default=False,
        ),
    ] = None,
    scene: Annotated[
        str | None, typer.Option(help="Where it is recorded; without it voice.scene.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The wav file.")] = Path("out.wav"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="How freely codes are drawn; 0 takes the likeliest. Without it voice.temperature.",
            min=0.0,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of what is drawn; without it the run's.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to compute; without it where the run was told to be.", show_default=False),
    ] = None,
    trust: Trusted = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was said of the clip as JSON.")] = False,
) -> None:
    """Speak a text with the model that a run kept, in the voice of a clip. Ends with 1 where nothing can be heard."""
    from trimtab.config import load_config
    from trimtab.errors import TrimtabError
    from trimtab.export.finished import read_run
    from trimtab.recipes.launch import quiet_libraries
    from trimtab.recipes.speak import Wanted, speak_run

    finished = read_run(run)
    _check_place(out, overwrite)
    words = trust_words(trust)
    words += [] if device is None else [f"device={device}", "precision=auto"]
    words += [] if temperature is None else [f"voice.temperature={temperature}"]
    config = load_config(run / "config.yaml", words)
    quiet_libraries()
    wanted = Wanted(
        text=text,
        reference=reference,
        reference_text=reference_text,
        speaker=speaker,
        scene=scene,
        seed=seed,
    )
    spoken = speak_run(config, run, finished.weights, wanted, lambda line: typer.echo(line, err=True))
    silence = config.voice.silence
    if (reason := spoken.unheard(silence)) is not None:
        raise TrimtabError(
            f"{spoken.told(silence)}; nothing was written\n"
            f"  why: {reason}\n"
            "  change: another --seed with a --temperature above 0, a clip that the model was trained with, or more "
            "training"
        )
    note = spoken.write(out)
    if as_json:
        told = {
            "file": str(out),
            "seconds": round(spoken.seconds, 3),
            "ended": spoken.ended,
            "peak": round(spoken.peak, 4),
            "loudness": round(spoken.loudness, 2),
            "rate": spoken.rate,
            "note": note,
        }
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    typer.echo(f"{out}: {spoken.told(silence)}")
    if note is not None:
        typer.echo(f"note: {note}")


def _check_place(out: Path, overwrite: bool) -> None:
    """Refuse a place that nothing may be written to, before anything is computed."""
    from trimtab.errors import RequestError

    if out.suffix.lower() != ".wav":
        raise RequestError.of(
            f"--out {out}: not called .wav", "a wav file is written", f"give --out {out.with_suffix('.wav')}"
        )
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise RequestError.of(
            f"--out {out}: {what}", "a file is written", "name a file in a folder that is there"
        )
    if out.exists() and not overwrite:
        raise RequestError.of(
            f"--out {out}: the file is there",
            "nothing of yours is replaced unless you say so",
            "name another file, or add --overwrite",
        )
