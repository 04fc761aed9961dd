"""The declared data sets of questions about pictures: where each lives, its splits, columns, answers and metric.

A set is chosen by its hub id in `data.source`, or by `vision.dataset` for a copy of one's own with the hub's columns.
A column that is not there is an error, never a default: a set trained on placeholder questions looks like a success.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from trimtab.data.clean import BadRow, Tally, needed
from trimtab.data.formats import parse_list
from trimtab.data.picture_values import answers_of, commonest_first
from trimtab.errors import RequestError

Get = Callable[[str], Any]
"""The value of a declared column in the row at hand."""


class Home(NamedTuple):
    """A place of a set on the hub, with the splits that it has there, by their names there."""

    id: str
    splits: tuple[str, ...]
    subset: str | None = None


class Columns(NamedTuple):
    """The names that a set has for what is asked of which picture; `more` are other columns that it needs."""

    question: str
    answer: str
    more: tuple[str, ...] = ()
    image: str = "image"

    @property
    def all(self) -> tuple[str, ...]:
        return (self.image, self.question, self.answer, *self.more)


Ask = Callable[[Get, Columns, Tally], tuple[str, tuple[str, ...]]]


def _plain(get: Get, columns: Columns, tally: Tally) -> tuple[str, tuple[str, ...]]:
    """One question; one answer, or a list of accepted ones."""
    question = needed(get(columns.question), columns.question, tally).strip()
    return question, answers_of(get(columns.answer), columns.answer, tally, written=True)


def _of_many_people(get: Get, columns: Columns, tally: Tally) -> tuple[str, tuple[str, ...]]:
    """One question and the answers of ten people; what most of them said is trained on."""
    question, answers = _plain(get, columns, tally)
    return question, commonest_first(answers)


def _choice(get: Get, columns: Columns, tally: Tally) -> tuple[str, tuple[str, ...]]:
    """One question with options; the answer is the place of the right one, counted from 0 and written as text."""
    question = needed(get(columns.question), columns.question, tally).strip()
    options = parse_list(get(columns.more[0]))
    if not isinstance(options, list) or not options:
        raise BadRow(f"`{columns.more[0]}` is not a list of options")
    place = needed(get(columns.answer), columns.answer, tally).strip()
    if not place.isdecimal() or int(place) >= len(options) or len(options) > 26:
        raise BadRow(f"`{columns.answer}` is {place[:20]!r}, no place among {len(options)} options")
    letters = [chr(ord("A") + number) for number in range(len(options))]
    lines = [
        f"{letter}. {needed(o, columns.more[0], tally)}" for letter, o in zip(letters, options, strict=True)
    ]
    ask = "Answer with the letter of the right option."
    return "\n".join([question, *lines, ask]), (letters[int(place)],)


@dataclass(frozen=True)
class PictureSet:
    """What is declared of a set."""

    name: str
    metric: str
    homes: tuple[Home, ...]
    columns: tuple[Columns, ...]
    """One entry per naming that its copies have; the first that fits the rows is taken."""
    ask: Ask = _plain
    lists: bool = False
    """Whether a row holds a list of questions and one of their answers."""


_TRAIN_VAL_TEST = ("train", "val", "test")
_ALL = ("train", "validation", "test")

SETS = {
    known.name: known
    for known in (
        PictureSet(
            "chartqa",
            "relaxed",
            (
                Home("HuggingFaceM4/ChartQA", _TRAIN_VAL_TEST),
                Home("ahmed-masry/ChartQA", _TRAIN_VAL_TEST),
                Home("lmms-lab/ChartQA", ("test",)),
            ),
            (Columns("query", "label"), Columns("question", "answer")),
        ),
        PictureSet(
            "infovqa",
            "anls",
            (
                Home("lmms-lab/DocVQA", ("validation", "test"), "InfographicVQA"),
                Home("vidore/infovqa_train", ("train",)),
                Home("vidore/infovqa_test_subsampled", ("test",)),
            ),
            (Columns("question", "answers"), Columns("query", "answer")),
        ),
        PictureSet(
            "docvqa",
            "anls",
            (Home("lmms-lab/DocVQA", ("validation", "test"), "DocVQA"),),
            (Columns("question", "answers"),),
        ),
        PictureSet(
            "ocrvqa",
            "exact",
            (Home("howard-hou/OCR-VQA", _ALL),),
            (Columns("questions", "answers"),),
            lists=True,
        ),
        PictureSet(
            "textvqa",
            "soft",
            (Home("lmms-lab/textvqa", _ALL),),
            (Columns("question", "answers"),),
            ask=_of_many_people,
        ),
        PictureSet(
            "ai2d",
            "exact",
            (Home("lmms-lab/ai2d", ("test",)),),
            (Columns("question", "answer", ("options",)),),
            ask=_choice,
        ),
        PictureSet(
            "vqav2",
            "soft",
            (
                Home("lmms-lab/VQAv2", ("validation", "testdev", "test")),
                Home("HuggingFaceM4/VQAv2", ("train", "validation", "testdev", "test")),
            ),
            (Columns("question", "answers"),),
            ask=_of_many_people,
        ),
    )
}


def find_set(source: str, subset: str | None, named: str | None) -> tuple[PictureSet, Home | None] | None:
    """The set behind a source, with its home there where the source is one; None for rows of one's own."""
    known = [SETS[_name(named)]] if named is not None else list(SETS.values())
    at_home = [(one, home) for one in known for home in one.homes if home.id.lower() == source.lower()]
    chosen = [(one, home) for one, home in at_home if subset is None or home.subset in (None, subset)]
    if len(chosen) == 1:
        return chosen[0]
    if at_home:
        subsets = " or ".join(f"data.subset={home.subset} ({one.name})" for one, home in at_home)
        raise RequestError.of(
            f"data.source={source}" + (f" with data.subset={subset}" if subset else ""),
            f"several sets live there: {', '.join(one.name for one, _ in at_home)}"
            if not subset
            else "the set has no such part",
            f"set {subsets}",
        )
    return (known[0], None) if named is not None else None


def _name(named: str) -> str:
    plain = "".join(letter for letter in named.lower() if letter.isalnum())
    plain = {"infographicvqa": "infovqa", "infographicsvqa": "infovqa", "vqa2": "vqav2"}.get(plain, plain)
    if plain in SETS:
        return plain
    near = get_close_matches(plain, SETS, n=1)
    raise RequestError.of(
        f"vision.dataset={named}: no set of that name is declared",
        f"the declared ones are {', '.join(SETS)}",
        f"did you mean {near[0]}?" if near else "leave it out and name your columns with data.columns",
    )


def check_split(known: PictureSet, home: Home, split: str, setting: str) -> None:
    """A split that the hub's copy does not have is refused before anything is loaded, with those that it has."""
    if split in home.splits:
        return
    near = "val" if split == "validation" and "val" in home.splits else home.splits[0]
    raise RequestError.of(
        f"{setting}={home.id} with the split `{split}`",
        f"{known.name} has the splits {', '.join(home.splits)} there",
        f"set data.split={near}" if setting == "data.source" else f"write {setting}: {home.id}[{near}]",
    )
