"""From `data.source` to the rows that a trainer takes: read, detect, clean, render, cut, split, report.

Stays on the CPU, knows no model but its tokenizer, and trains on nothing that the report does not account for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import datasets

from trimtab.config.schema import DataSettings
from trimtab.data.clean import Tally, usable
from trimtab.data.convert import Example, convert
from trimtab.data.formats import Detected, check_columns, detect, unused_columns
from trimtab.data.read import Row
from trimtab.data.render import IGNORED, Encoded, Renderer
from trimtab.data.report import DataReport, Lengths, SourceReport
from trimtab.data.sources import HELD_OUT, Loaded, load_rows
from trimtab.data.split import hold_out
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedData:
    """Rows with `input_ids` and `labels`, ready for a trainer, and the report on how they came about."""

    train: datasets.Dataset
    eval: datasets.Dataset | None
    report: DataReport


def prepare_data(settings: DataSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreparedData:
    """Read, check, render and split the data of a run."""
    renderer = Renderer(tokenizer, settings.train_on)
    rows, about = _prepare_source(settings.source, "data.source", settings, renderer)
    notes: list[str] = []
    longest = tokenizer.model_max_length
    if longest < settings.max_length:
        notes.append(f"data.max_length={settings.max_length} is over the model's own limit of {longest}")

    about_eval: SourceReport | None = None
    eval_rows: list[Encoded] = []
    own = HELD_OUT.get(settings.source) if settings.eval_fraction > 0 else None
    if held := settings.eval_source or own:
        eval_rows, about_eval = _prepare_source(held, "data.eval_source", settings, renderer)
        train_rows = rows
        split = "the set's own held-out rows" if settings.eval_source is None else f"data.eval_source={held}"
        shared = _keys(train_rows) & _keys(eval_rows)
        if shared:
            notes.append(
                f"data.eval_source and data.source overlap: {_rows(len(shared))} of evaluation "
                f"{'is' if len(shared) == 1 else 'are'} also trained on"
            )
    elif settings.eval_fraction > 0:
        # One key per conversation: a conversation that became several rows stays on one side.
        whole = _one_per_example(rows)
        _, held_out, split = hold_out(whole, lambda row: row.example.key, settings.eval_fraction, seed)
        chosen = _keys(held_out)
        train_rows = [row for row in rows if row.example.key not in chosen]
        eval_rows = [row for row in rows if row.example.key in chosen]
        eval_rows = _without_shared(train_rows, eval_rows, settings, notes)
    else:
        train_rows, split = rows, "data.eval_fraction=0"

    report = DataReport(
        train=about,
        eval=about_eval,
        rows_train=len(train_rows),
        rows_eval=len(eval_rows),
        split=split,
        tokens=sum(len(row.input_ids) for row in train_rows),
        trained_tokens=sum(_trained(row) for row in train_rows),
        notes=notes,
    )
    return PreparedData(_dataset(train_rows), _dataset(eval_rows) if eval_rows else None, report)


def _prepare_source(
    source: str, setting: str, settings: DataSettings, renderer: Renderer
) -> tuple[list[Encoded], SourceReport]:
    tally = Tally(strict=settings.bad_rows == "stop")
    loaded = load_rows(source, settings, setting)
    detected = detect(loaded.rows, settings.format, settings.columns)
    examples = _examples(loaded, detected, settings, tally)
    whole = renderer.encode(examples, tally)
    rows, cut, notes = _cut(whole, settings, tally)
    if not rows:
        raise _nothing_left(setting, source, loaded, settings, tally)
    about = SourceReport(
        source=loaded.source,
        files=loaded.files,
        cache=loaded.cache,
        format=detected.form.name,
        format_reason=detected.reason,
        rows_read=len(loaded.rows),
        rows_kept=len(_one_per_example(rows)),
        dropped=dict(tally.dropped.most_common()),
        first_dropped=dict(tally.first),
        changed=dict(tally.changed.most_common()),
        unused_columns=unused_columns(loaded.rows[0], detected.form, settings.columns),
        lengths=Lengths.of([len(row.input_ids) for row in whole]),
        cut=cut,
        notes=loaded.notes + notes,
    )
    return rows, about


def _examples(loaded: Loaded, detected: Detected, settings: DataSettings, tally: Tally) -> list[Example]:
    def converted(row: Row) -> Example:
        check_columns(row, detected.form, loaded.rows[0], settings.columns)
        return convert(row, detected.form, settings.columns, tally)

    found = usable(loaded.rows, converted, lambda e: e.key, tally, repeats=settings.keep_duplicates)
    return [example for _, example in found]


def _cut(
    whole: Sequence[Encoded], settings: DataSettings, tally: Tally
) -> tuple[list[Encoded], int, list[str]]:
    """Cut or drop what is over max_length. A row without a trained token is never kept: its loss would be NaN."""
    rows: list[Encoded] = []
    longest = settings.max_length
    cut = lost = 0
    for row in whole:
        where = row.example.where
        if len(row.input_ids) > longest:
            if settings.too_long == "drop":
                tally.drop(f"longer than data.max_length={longest} (data.too_long=drop)", where)
                continue
            cut += 1
            row = Encoded(row.input_ids[:longest], row.labels[:longest], row.example)
        if _trained(row):
            rows.append(row)
        else:
            lost += 1
            tally.drop(f"no answer token left at data.max_length={longest}", where)
    notes = []
    if cut > lost:
        told = f"{_rows(cut - lost)} cut at data.max_length={longest}"
        notes.append(f"{told}; the end of the answer is not trained on")
    if lost:
        verb = "loses" if lost == 1 else "lose"
        notes.append(f"{_rows(lost)} {verb} every answer token at data.max_length={longest}; raise it")
    return rows, cut, notes


def _without_shared(
    train: Sequence[Encoded], held: Sequence[Encoded], settings: DataSettings, notes: list[str]
) -> list[Encoded]:
    """Different rows can become equal when they are cut or written per answer; such ones are not held out."""
    trained = {tuple(row.input_ids) for row in train}
    kept = [row for row in held if tuple(row.input_ids) not in trained]
    if len(kept) < len(held):
        notes.append(f"{_rows(len(held) - len(kept))} held out equal a training row once rendered: left out")
    if not kept:
        raise RequestError.of(
            f"data.eval_fraction={settings.eval_fraction}: every row held out equals a training row once rendered",
            f"cut at data.max_length={settings.max_length} the rows no longer differ",
            "raise data.max_length, name a data.eval_source, or set data.eval_fraction=0",
        )
    return kept


def _nothing_left(
    setting: str, source: str, loaded: Loaded, settings: DataSettings, tally: Tally
) -> RequestError:
    change = "repair the rows, or check data.format and data.columns"
    if any("data.max_length" in reason for reason in tally.dropped):
        change = f"raise data.max_length={settings.max_length}"
    return RequestError.of(
        f"{setting}={source}: none of its {len(loaded.rows):,} rows can be trained on",
        "; ".join(tally.reasons()),
        change,
    )


def _one_per_example(rows: Iterable[Encoded]) -> list[Encoded]:
    return list({row.example.where: row for row in rows}.values())


def _keys(rows: Iterable[Encoded]) -> set[str]:
    return {row.example.key for row in rows}


def _trained(row: Encoded) -> int:
    """Tokens that the loss falls on. The first token has nothing before it to be predicted from."""
    return sum(label != IGNORED for label in row.labels[1:])


def _rows(number: int) -> str:
    return f"{number:,} row" if number == 1 else f"{number:,} rows"


def _dataset(rows: Sequence[Encoded]) -> datasets.Dataset:
    columns = {name: [getattr(row, name) for row in rows] for name in ("input_ids", "labels")}
    return datasets.Dataset.from_dict(columns)
