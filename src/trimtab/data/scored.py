"""Rows with given answers, for recipes that score answers: read, put to the model as questions, split, reported.

The questions are a known task's (`zeroth.task`) or come from a template over columns. Only text: it tokenizes
nothing. A row without a usable label is dropped and counted or stops the run, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.config.schema import Config, ZerothSettings
from trimtab.data.clean import BadRow, Tally, usable
from trimtab.data.fill import check_braces, column, fill
from trimtab.data.read import Row
from trimtab.data.report import AskedReport
from trimtab.data.sources import load_rows
from trimtab.data.split import hold_out
from trimtab.data.tasks import Question, Task, task
from trimtab.data.tasks.load import load_task, plain_name
from trimtab.errors import RequestError

Ask = Callable[[Row], Question]


@dataclass(frozen=True)
class ScoredData:
    """Questions to train on and to evaluate by, and how they came about."""

    train: list[Question]
    eval: list[Question]
    task: Task | None
    report: AskedReport


def prepare_scored(config: Config) -> ScoredData:
    """The questions of a run: from a task's own sets, or from `data.source` as every recipe reads it."""
    data, zeroth = config.data, config.zeroth
    known = task(zeroth.task) if zeroth.task is not None else None
    ask: Ask = known.question if known is not None else _template(zeroth)
    tally = Tally(strict=data.bad_rows == "stop")
    notes: list[str] = []
    evaluated: list[Question] = []
    split, own_held = "data.eval_fraction=0", data.eval_source is None and data.eval_fraction > 0
    if known is not None and _is_task_place(data.source, known):
        rows = load_task(
            known, data.source, train_rows=data.max_rows, eval_rows=data.max_rows, seed=config.seed
        )
        source = rows.source
        train = _questions(rows.splits["train"], ask, tally, "data.source", True)
        if own_held:
            evaluated = _questions(rows.splits["validation"], ask, tally, "data.source", True)
            split = "the task's own train and validation"
    else:
        loaded = load_rows(data.source, data, "data.source")
        source, notes = loaded.source, list(loaded.notes)
        renamed = _renamed(loaded.rows, data.columns)
        train = _questions(renamed, ask, tally, "data.source", data.keep_duplicates)
        if own_held:
            train, evaluated, split = hold_out(train, _side, data.eval_fraction, config.seed)
    if data.eval_source is not None:
        loaded = load_rows(data.eval_source, data, "data.eval_source")
        evaluated = _questions(_renamed(loaded.rows, data.columns), ask, tally, "data.eval_source", True)
        split = f"data.eval_source={data.eval_source}"
        shared = len({_key(q) for q in train} & {_key(q) for q in evaluated})
        if shared:
            notes.append(f"data.eval_source and data.source overlap in {shared:,} rows, also trained on")
    report = AskedReport(
        source=source,
        asked=f"{known.title}: {known.template}" if known else _shown(zeroth),
        rows_train=len(train),
        rows_eval=len(evaluated),
        split=split,
        dropped=dict(tally.dropped.most_common()),
        first_dropped=dict(tally.first),
        notes=notes,
    )
    return ScoredData(train, evaluated, known, report)


def _is_task_place(source: str, known: Task) -> bool:
    """Whether a source holds whole tasks: the shipped sample, the task's home on the hub, or a folder of tasks."""
    if source in ("sample", "hub"):
        return True
    folder = Path(source).expanduser()
    return folder.is_dir() and known.name in map(plain_name, folder.iterdir())


def _questions(
    rows: list[Row], ask: Ask, tally: Tally, setting: str, keep_duplicates: bool
) -> list[Question]:
    refused: list[RequestError] = []

    def asked(row: Row) -> Question:
        try:
            return ask(row)
        except RequestError as error:
            if tally.strict:
                raise
            refused.append(error)
            raise BadRow(str(error).splitlines()[0].removeprefix(f"{row.where}: ")) from None

    questions = [question for _, question in usable(rows, asked, _key, tally, repeats=keep_duplicates)]
    if not questions:
        assert refused, "a source without rows was refused before"
        raise RequestError(f"{setting}: none of its {len(rows):,} rows can be used; the first:\n{refused[0]}")
    return questions


def _template(settings: ZerothSettings) -> Ask:
    """Questions from a template over the row's own columns."""
    assert settings.template is not None, "checked with the config"
    template, answer = settings.template, settings.answer
    for name, text in (("zeroth.template", template), ("zeroth.answer", answer or "")):
        check_braces(name, text)
    labels = list(settings.labels)

    def ask(row: Row) -> Question:
        try:
            prompt = fill(template, row)
            if answer is not None:
                return Question(prompt, [fill(answer, row)], 0, row.where)
            label = str(column(row, settings.label_column))
        except BadRow as bad:
            raise RequestError.of(
                f"{row.where}: {bad}",
                f"the row has {', '.join(map(str, row.values)) or 'no columns'}",
                "correct the name in zeroth.template, zeroth.answer or zeroth.label_column, or leave the row out",
            ) from None
        if label not in labels:
            raise RequestError.of(
                f"{row.where}: `{settings.label_column}` holds {label[:40]!r}",
                f"zeroth.labels has {', '.join(labels)}",
                "add it to zeroth.labels, or leave the row out",
            )
        return Question(prompt, list(settings.labels.values()), labels.index(label), row.where)

    return ask


def _renamed(rows: list[Row], columns: Mapping[str, str]) -> list[Row]:
    """`data.columns` gives a task's column the name that the file has for it. A row without that has neither."""
    if not columns:
        return rows
    renamed = []
    for row in rows:
        values = {name: value for name, value in row.values.items() if name not in columns}
        values |= {ours: row.values[theirs] for ours, theirs in columns.items() if theirs in row.values}
        renamed.append(row._replace(values=values))
    return renamed


def _shown(settings: ZerothSettings) -> str:
    answers = settings.answer if settings.answer is not None else " | ".join(settings.labels.values())
    return f"{settings.template!r} -> {answers!r}"


def _key(question: Question) -> str:
    return json.dumps([question.prompt, question.options, question.gold])


def _side(question: Question) -> str:
    """Rows that are judged together are held out together."""
    return question.group or _key(question)
