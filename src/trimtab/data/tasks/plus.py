"""The "+" of GLUE+: BoolQ, CB, COPA, WiC, WSC, MultiRC, ReCoRD and SQuAD, asked as MeZO asks them."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from trimtab.data.tasks.glue import INFER, NO_YES, built, fixed, worded
from trimtab.data.tasks.task import Fields

HUB = "aps/super_glue"


def _boolq(row: Fields) -> str:
    question = row.text("question").rstrip("?")
    return f"{row.text('passage')} {question[:1].upper()}{question[1:]}?\n"


def _copa_prompt(row: Fields) -> str:
    asked = row.text("question")
    if asked not in ("cause", "effect"):
        raise row.wrong(f"column `question` holds {asked!r}", "COPA asks for the `cause` or the `effect`")
    return row.text("premise").rstrip(".") + (" because" if asked == "cause" else " so")


def _copa_options(row: Fields) -> list[str]:
    return [" " + _lower_first(row.text(name)) for name in ("choice1", "choice2")]


def _lower_first(sentence: str) -> str:
    first = re.split(r"[^\w]", sentence, maxsplit=1)[0]
    return sentence if first == "I" else sentence[0].lower() + sentence[1:]


def _multirc_question(row: Fields) -> str:
    """The question that an answer belongs to: by the set's own numbers, else by the texts."""
    place: Any = row.get("idx")
    if isinstance(place, dict) and {"paragraph", "question"} <= place.keys():
        return f"{place['paragraph']}/{place['question']}"
    return json.dumps([row.text("paragraph"), row.text("question")])


def _entities(row: Fields) -> list[str]:
    """The candidates, each once, in the set's order."""
    return list(dict.fromkeys(row.texts("entities")))


def _record_gold(row: Fields) -> int:
    answers = row.texts("answers")
    for place, entity in enumerate(_entities(row)):
        if entity in answers:
            return place
    found = f"none of the answers {answers} is among the entities"
    raise row.wrong(found, "ReCoRD's answer is one of the entities of the passage")


def _record_prompt(row: Fields) -> str:
    passage = row.text("passage").replace("@highlight\n", "- ")
    return f'{passage}\n{row.text("query")}\nQuestion: what is the "@placeholder"\nAnswer:'


def _squad_prompt(row: Fields) -> str:
    title = row.get("title")
    head = f"Title: {title}\n" if title else ""
    return f"{head}Context: {row.text('context')}\nQuestion: {row.text('question')}\nAnswer:"


_plus = partial(worded, hub=HUB)
_chosen = partial(built, hub=HUB, kind="choice", train_on="answer")

PLUS = (
    built(
        "boolq",
        "BoolQ",
        "passage question label|answer",
        hub=HUB,
        answers=fixed(*NO_YES),
        template="<passage> <Question>?\\n -> 0 No, 1 Yes",
        render=_boolq,
    ),
    _plus("cb", "CB", "premise hypothesis label", INFER, ("Yes", "No", "Maybe"), "accuracy", "f1_macro"),
    _chosen(
        "copa",
        "COPA",
        "premise choice1 choice2 question label",
        template="<premise without its stop> because | so -> choice1, choice2",
        render=_copa_prompt,
        answers=_copa_options,
    ),
    _plus(
        "wic",
        "WiC",
        "word sentence1 sentence2 label",
        'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n{sentence1}\n{sentence2}\n',
        NO_YES,
    ),
    built(
        "wsc",
        "WSC",
        "text span1_text span2_text label",
        hub=HUB,
        answers=fixed(*NO_YES),
        subset="wsc.fixed",
        template='<text>\\nIn the previous sentence, does the pronoun "<span2>" refer to <span1>? Yes or No?\\n '
        "-> 0 No, 1 Yes",
        render=lambda row: (
            f'{row.text("text")}\nIn the previous sentence, does the pronoun "{row.text("span2_text").lower()}" '
            f"refer to {row.text('span1_text')}? Yes or No?\n"
        ),
    ),
    _plus(
        "multirc",
        "MultiRC",
        "paragraph question answer label",
        '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? Yes or No?\n',
        NO_YES,
        "f1a",
        "em",
        grouped_by=_multirc_question,
    ),
    _chosen(
        "record",
        "ReCoRD",
        "passage query entities answers",
        "f1",
        "em",
        template='<passage>\\n<query>\\nQuestion: what is the "@placeholder"\\nAnswer: -> one of the entities',
        render=_record_prompt,
        answers=lambda row: [" " + entity for entity in _entities(row)],
        target=_record_gold,
        accepted=lambda row: row.texts("answers"),
    ),
    built(
        "squad",
        "SQuAD",
        "context question answers",
        "f1",
        "em",
        kind="answer",
        template="Title: <title>\\nContext: <context>\\nQuestion: <question>\\nAnswer: -> the answer, a line break",
        hub="rajpurkar/squad",
        subset=None,
        render=_squad_prompt,
        answers=lambda row: [" " + row.texts("answers")[0] + "\n"],
        target=lambda row: 0,
        train_on="answer",
        accepted=lambda row: row.texts("answers"),
    ),
)
