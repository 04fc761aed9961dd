"""`trimtab rehearse`: run a script, a config or a launcher's line on virtual GPUs, and report what it meets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.output_files import check_outputs

if TYPE_CHECKING:
    from trimtab.rehearse.session import Settings
    from trimtab.rehearse.verdict import Result

CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Our options end at the first word that is not one of them; the rest is the script's own."""


def rehearse(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            help="CONFIG | SCRIPT.py [ARGS…] | -m MODULE [ARGS…] | python, torchrun, accelerate launch, deepspeed, "
            "srun or mpirun with its options and SCRIPT [ARGS…] | bash run.sh [ARGS…]; NAME=VALUE may stand before.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "--gpu",
            help="Virtual GPUs: a count, a model or both (2, H200, 2xH200). Default: one per rank.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Start this many ranks of the script, as torchrun would.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many optimizer steps.")
    ] = None,
    shapes_only: Annotated[
        bool,
        typer.Option(
            "--shapes-only",
            help="Big tensors have shapes and no values: models of any size run, from their config alone, and one "
            "rank stands for all.",
        ),
    ] = False,
    every_rank: Annotated[
        bool,
        typer.Option(
            "--every-rank",
            help="With --shapes-only: start all ranks, each with shapes of its own, and compare what they exchange.",
        ),
    ] = False,
    try_fixes: Annotated[
        bool,
        typer.Option(
            "--try-fixes",
            help="Rehearse again with the fixes in place (in memory; no file is touched), and say whether they help.",
        ),
    ] = False,
    write_fixes: Annotated[
        Path | None,
        typer.Option(
            help="Try the fixes, and write those that help as a patch to this new file.", dir_okay=False
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to give it.")] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report here as JSON.", dir_okay=False)
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write the report here as one HTML page.", dir_okay=False)
    ] = None,
    sarif_file: Annotated[
        Path | None,
        typer.Option(
            "--sarif", help="Write the findings here as SARIF 2.1.0, for code scanning.", dir_okay=False
        ),
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Also print the findings as annotations of a GitHub workflow.")
    ] = False,
    keep_files: Annotated[
        Path | None,
        typer.Option(
            help="Keep what the script writes in this new or empty folder. Default: thrown away.",
            file_okay=False,
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Let the script write its files for real, where it wants them."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error of ours.")] = False,
) -> None:
    """Run a training script, unchanged, on GPUs that are not there, and report every fault that it meets.

    Our options stand before the script; everything after its path is the script's own. The files that it writes go to
    an overlay, where the system permits one, and nothing of yours is changed. Exit code: 0 clean, 1 a fault
    was found, 2 the request is wrong, 3 unproven (time ran out, or the process was killed).
    """
    from trimtab.cli.faults import show_tracebacks
    from trimtab.cli.told_to_end import left_to_the_system
    from trimtab.errors import RequestError
    from trimtab.files import plain_value
    from trimtab.hardware.catalogue import accelerators
    from trimtab.models.builtin_ready import make_ready
    from trimtab.redaction import hiding
    from trimtab.rehearse.report import render
    from trimtab.rehearse.run import rehearse as run
    from trimtab.rehearse.session import Settings

    if debug:
        show_tracebacks()
    check_outputs(
        [
            ("--json", json_file),
            ("--html", html_file),
            ("--sarif", sarif_file),
            ("--write-fixes", write_fixes),
        ]
    )
    if html_file is not None:
        from trimtab.report.make import check_place

        check_place(html_file, "--html")
    for option, file, keys in (
        ("--json", json_file, {"verdict", "findings"}),
        ("--sarif", sarif_file, {"$schema", "runs"}),
    ):
        if file is not None and not _ours_to_write(file, keys):
            raise RequestError.of(
                f"{option} {file}: there is a file that is no report of Trimtab",
                "only an earlier report is replaced",
                "name another file, or remove this one",
            )
    if write_fixes is not None and write_fixes.exists():
        raise RequestError.of(
            f"--write-fixes {write_fixes}: there is such a file",
            "a patch that stands there already would be lost",
            "name a new file",
        )
    left_to_the_system()
    words = list(target or [])
    settings = Settings(max_steps=max_steps, gpus_given=gpus is not None, shapes_only=shapes_only)
    settings.every_rank = every_rank
    machine = accelerators(gpus or "1")
    first = machine[0]
    major, minor = (first.capability or "9.0").split(".")
    settings.gpus, settings.gpu_name = len(machine), first.model
    settings.memory_bytes, settings.capability = first.total_bytes, (int(major), int(minor))

    make_ready(words, shapes_only=shapes_only)
    dim = sys.stdout.isatty()
    print("\x1b[2m" if dim else "", end="", flush=True)
    try:
        result = run(
            words,
            settings,
            ranks=ranks,
            timeout=timeout,
            keep=keep_files,
            in_place=in_place,
            tells_stopped=True,
        )
    finally:
        print("\x1b[0m" if dim else "", end="", flush=True)
    if not result.stopped:
        options = {"ranks": ranks, "in_place": in_place}
        try:
            _try_changes(result, words, settings, timeout, try_fixes, write_fixes, **options)
        except KeyboardInterrupt:
            result.stopped = True
            result.notes.append("you stopped it while changes were tried: the rest was not")
    hide = hiding()
    print(hide(render(result, colour=sys.stdout.isatty())))
    told = plain_value(result.to_dict(), of_text=hide) if json_file or html_file else {}
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=1) + "\n")
    if html_file is not None:
        from trimtab.report.rehearsal import rehearsal_page

        html_file.write_text(rehearsal_page(told), encoding="utf-8")
    if write_fixes is not None:
        print(
            f"the fixes that help: {write_fixes} (git apply, or patch -p1)"
            if write_fixes.exists()
            else "no fix was seen to help: no patch is written"
        )
    if github or sarif_file is not None:
        from trimtab.rehearse.annotations import as_annotations, repository
        from trimtab.rehearse.sarif import sarif

        root = repository(Path.cwd())
        if sarif_file is not None:
            sarif_file.write_text(
                json.dumps(plain_value(sarif(result, root), of_text=hide), indent=1) + "\n", encoding="utf-8"
            )
        if github:
            print(hide("\n".join(as_annotations(result, root))))
    raise typer.Exit(result.exit_code)


def _try_changes(
    result: Result,
    words: list[str],
    settings: Settings,
    timeout: float,
    tries_fixes: bool,
    patch: Path | None,
    **options: Any,
) -> None:
    """Rehearse again with the fixes, and with what would save memory where a GPU is too small."""
    if tries_fixes or patch is not None:
        from trimtab.rehearse import fixes

        again = fixes.tried_silently(words, settings, timeout=timeout, **options)
        texts = fixes.try_fixes(result, again, tell=_tell)
        if patch is not None and texts:
            patch.write_text(fixes.patch(texts), encoding="utf-8")
    if any(finding.lack is not None for finding in result.findings):
        from trimtab.rehearse import savings

        savings.try_savings(
            result,
            savings.changes_for(words, settings.gpus, result),
            savings.again_with(words, settings, **options),
            min(timeout - result.seconds, timeout / 2),
            tell=_tell,
            search=savings.search_for(words, settings),
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ours_to_write(file: Path, keys: set[str]) -> bool:
    """Whether a report may be written there: to a new place, an empty file, or over an earlier report."""
    if not file.is_file() or not file.stat().st_size:
        return True
    try:
        there = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(there, dict) and keys <= there.keys()
