"""`trimtab report`: finds out what it is given (a run, a benchmark, a rehearsal, a fit), and writes its page.

It replaces a page that it made before, and no other file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError
from trimtab.files import write_whole
from trimtab.reading import parse_json, read_text
from trimtab.recipes.run_mark import claim
from trimtab.report.frame import GENERATOR
from trimtab.report.run_facts import RUN_FILES, RunFacts, hidden, read_run

NAME = "report.html"
_WANTED = (
    "a report is made of a folder that `trimtab train` or `trimtab bench` wrote, or of a JSON file of "
    "`trimtab rehearse --json` or `trimtab fit --json`"
)


@dataclass(frozen=True)
class Report:
    """A page and what it tells, for machines."""

    page: str
    facts: dict[str, Any]
    path: Path
    """Where it belongs unless told otherwise."""


def make_report(source: Path) -> Report:
    """The page of whatever `source` is."""
    source = source.expanduser()
    if source.is_file():
        return _of_file(source)
    if not source.is_dir():
        raise RequestError.of(f"{source}: there is no such folder or file", _WANTED, "check the path")
    if (source / "results.json").is_file():
        return _of_benchmark(source)
    if any((source / name).is_file() for name in RUN_FILES):
        return _of_run(source)
    raise RequestError.of(
        f"{source}: not a run's folder",
        f"it holds none of {', '.join(RUN_FILES)}, and no results.json; {_WANTED}",
        "name the run's own folder, such as runs/NAME",
    )


def write_page(report: Report, out: Path | None) -> Path:
    """Write the page, whole or not at all; returns where."""
    target = (out or report.path).expanduser()
    check_place(target, "--out")
    try:
        claim(target.parent, target.name)
        write_whole(target, report.page)
    except OSError as error:
        raise RequestError.of(
            f"{target}: cannot be written ({error.strerror})",
            "the page needs a place that may be written to",
            "name another file with --out",
        ) from None
    return target


def check_place(target: Path, option: str) -> None:
    """Refuse a place where no page may be written, or where something else would be lost."""
    if target.is_dir():
        raise RequestError.of(
            f"{option} {target}: a folder", "a page is a file", f"give {option} {target / NAME}"
        )
    if target.is_file() and GENERATOR not in target.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise RequestError.of(
            f"{target}: there is a file that is no page of Trimtab",
            "only an earlier page is replaced",
            f"name another file with {option}, or remove this one",
        )


def _of_run(folder: Path) -> Report:
    from trimtab.report.run import run_page

    with _whole(folder, "files of a run", "put back what the run wrote"):
        run = read_run(folder)
        return Report(run_page(run), _told(run), folder / NAME)


def _told(run: RunFacts) -> dict[str, Any]:
    latest = {row["phase"]: row for row in run.of_phase("train", "eval")}
    return {
        "kind": "run",
        "status": run.status,
        "status_line": run.status_line,
        "recipe": run.recipe,
        "model": run.model,
        "last_step": run.last_step,
        "missing": run.missing,
        "health": [asdict(event) for event in run.events()],
        "summary": run.summary,
        "plan": run.plan,
        "data": run.data,
        "latest": latest,
    }


def _of_benchmark(folder: Path) -> Report:
    from trimtab.report.bench import bench_page, failures, known

    file = folder / "results.json"
    content = hidden(_json(file))
    with _whole(file, "results of a benchmark", "run the benchmark again"):
        fits = known(content)
    if not fits:
        raise RequestError.of(f"{file}: not the results of a benchmark", _WANTED, "check the path")
    with _whole(file, "results of a benchmark", "run the benchmark again"):
        page, failed = bench_page(folder, content), failures(content)
    told = {"kind": "benchmark", "benchmark": content["run"]["benchmark"], "failed": failed}
    return Report(page, told | dict(content), folder / NAME)


def _of_file(file: Path) -> Report:
    from trimtab.diagnose.finding import Finding
    from trimtab.rehearse.verdict import EXIT_CODES
    from trimtab.report.fit import fit_page, is_fit
    from trimtab.report.rehearsal import rehearsal_page

    content = hidden(_json(file))
    if is_fit(content):
        with _whole(file, "output of a fit", "make it again: trimtab fit … --json"):
            return Report(fit_page(content), {"kind": "fit", **content}, file.with_suffix(".html"))
    if not isinstance(content, Mapping) or content.get("verdict") not in list(EXIT_CODES):
        raise RequestError.of(f"{file}: not the report of a rehearsal", _WANTED, "check the path")
    with _whole(file, "report of a rehearsal", "rehearse again with --json"):
        for finding in content["findings"]:
            Finding.from_dict(finding)  # what is none is not shown as one
        page = rehearsal_page({**content, "target": content.get("target") or file.name})
    return Report(page, {"kind": "rehearsal", **content}, file.with_suffix(".html"))


def _json(file: Path) -> Any:
    try:
        return parse_json(read_text(file))
    except ValueError as error:
        raise RequestError.of(f"{file}: not valid JSON ({error})", _WANTED, "check the path") from None


@contextmanager
def _whole(file: Path, what: str, change: str) -> Iterator[None]:
    """Reading a file of another shape than ours is told as such."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, OSError) as error:
        raise RequestError.of(
            f"{file}: the {what}, but not whole ({type(error).__name__}: {str(error)[:300]})",
            "it was changed, or written by another version",
            change,
        ) from None
