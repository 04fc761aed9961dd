"""Which coded rows a model can be trained on, found before the first step: sound, and within the tokens it takes.

Nothing is cut and nothing is repaired: a row is kept whole, or left out and counted, or it stops the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from trimtab.data.clean import BadRow, Tally
from trimtab.data.report import Lengths
from trimtab.data.voice_collate import CodedRow, VoiceCollator, too_long
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.config.schema import DataSettings
    from trimtab.data.report import SourceReport, VoiceReport


def fitting(
    collator: VoiceCollator,
    train: Sequence[CodedRow],
    held: Sequence[CodedRow],
    data: DataSettings,
    report: VoiceReport,
) -> tuple[list[CodedRow], list[CodedRow]]:
    """The rows of both parts that fit; the report gets what became of the others."""
    # Held-out rows of the one source are counted with it.
    about: dict[int, tuple[SourceReport, Tally, list[int]]] = {}
    kept: list[list[CodedRow]] = []
    for rows, source in ((train, report.train), (held, report.eval or report.train)):
        _, tally, lengths = about.setdefault(id(source), (source, Tally(data.bad_rows == "stop"), []))
        kept.append([row for row in rows if _fits(collator, row, data, tally, lengths)])
    for source, tally, lengths in about.values():
        source.rows_kept -= tally.dropped.total()
        for reason, number in tally.dropped.items():
            source.dropped[reason] = source.dropped.get(reason, 0) + number
            source.first_dropped.setdefault(reason, tally.first[reason])
        source.lengths = Lengths.of(lengths) if lengths else None
    if not kept[0]:
        reasons = "; ".join(about[id(report.train)][1].reasons()) or "there was none"
        raise RequestError.of(
            f"no row is left to train on: {reasons}",
            "a clip is never cut, and what cannot be trained on is left out",
            "raise data.max_length as far as the model has places, or repair the rows",
        )
    report.rows_train, report.rows_eval = len(kept[0]), len(kept[1])
    # A codec makes as many frames of every second.
    report.minutes_train *= _share(kept[0], train)
    report.minutes_eval *= _share(kept[1], held)
    speakers = Counter(row.row.speaker for row in chain(*kept) if row.row.speaker is not None)
    report.speakers = dict(speakers.most_common())
    report.notes.append(collator.turns.how)
    return kept[0], kept[1]


def _share(kept: Sequence[CodedRow], rows: Sequence[CodedRow]) -> float:
    """How much of what is said in the rows is left."""
    said, left = (sum(len(row.target) for row in some if row.target is not None) for some in (rows, kept))
    return left / said if said else 1.0


def _fits(
    collator: VoiceCollator, row: CodedRow, data: DataSettings, tally: Tally, lengths: list[int]
) -> bool:
    try:
        tokens = len(collator.made(row).ids)
    except BadRow as bad:
        tally.bad(str(bad), row.row.where)
        return False
    lengths.append(tokens)
    if collator.most is None or tokens <= collator.most:
        return True
    if data.too_long == "truncate" and tally.strict:
        raise too_long(row, tokens, collator.limit())
    tally.drop(f"longer than {collator.limit()}: a clip is never cut", row.row.where)
    return False
