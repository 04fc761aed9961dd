"""The "+" of GLUE+: BoolQ, CB, COPA, WiC, WSC, MultiRC, ReCoRD and SQuAD, asked as MeZO asks them."""

from __future__ import annotations

import json
import re
from typing import Any

from trimtab.data.tasks.glue import NO_YES, fixed, label
from trimtab.data.tasks.task import Fields, Task
from trimtab.errors import RequestError

HUB = "aps/super_glue"


def _boolq(row: Fields) -> str:
    question = row.text("question").rstrip("?")
    return f"{row.text('passage')} {question[0].upper()}{question[1:]}?\n"


def _copa_prompt(row: Fields) -> str:
    asked = row.text("question")
    if asked not in ("cause", "effect"):
        raise RequestError.of(
            f"{row.where}: column `question` holds {asked!r}",
            "COPA asks for the `cause` or the `effect`",
            "correct the row, or leave it out",
        )
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
    entities, answers = _entities(row), row.texts("answers")
    for place, entity in enumerate(entities):
        if entity in answers:
            return place
    raise RequestError.of(
        f"{row.where}: none of the answers {answers} is among the entities",
        "ReCoRD's answer is one of the entities of the passage",
        "correct the row, or leave it out",
    )


def _record_prompt(row: Fields) -> str:
    passage = row.text("passage").replace("@highlight\n", "- ")
    return f'{passage}\n{row.text("query")}\nQuestion: what is the "@placeholder"\nAnswer:'


def _squad_prompt(row: Fields) -> str:
    title = row.get("title")
    head = f"Title: {title}\n" if title else ""
    return f"{head}Context: {row.text('context')}\nQuestion: {row.text('question')}\nAnswer:"


PLUS = (
    Task(
        name="boolq",
        title="BoolQ",
        kind="classification",
        columns=("passage", "question", "label|answer"),
        metrics=("accuracy",),
        template="<passage> <Question>?\\n -> 0 No, 1 Yes",
        hub=HUB,
        subset="boolq",
        render=_boolq,
        answers=fixed(*NO_YES),
        target=label,
    ),
    Task(
        name="cb",
        title="CB",
        kind="classification",
        columns=("premise", "hypothesis", "label"),
        metrics=("accuracy", "f1_macro"),
        template=(
            'Suppose <premise> Can we infer that "<hypothesis>"? Yes, No, or Maybe?\\n -> 0 Yes, 1 No, 2 Maybe'
        ),
        hub=HUB,
        subset="cb",
        render=lambda row: (
            f'Suppose {row.text("premise")} Can we infer that "{row.text("hypothesis")}"? Yes, No, or Maybe?\n'
        ),
        answers=fixed("Yes", "No", "Maybe"),
        target=label,
    ),
    Task(
        name="copa",
        title="COPA",
        kind="choice",
        columns=("premise", "choice1", "choice2", "question", "label"),
        metrics=("accuracy",),
        template="<premise without its stop> because | so -> choice1, choice2",
        hub=HUB,
        subset="copa",
        render=_copa_prompt,
        answers=_copa_options,
        target=label,
        train_on="answer",
    ),
    Task(
        name="wic",
        title="WiC",
        kind="classification",
        columns=("word", "sentence1", "sentence2", "label"),
        metrics=("accuracy",),
        template=(
            'Does the word "<word>" have the same meaning in these two sentences? Yes, No?\\n'
            "<sentence1>\\n<sentence2>\\n -> 0 No, 1 Yes"
        ),
        hub=HUB,
        subset="wic",
        render=lambda row: (
            f'Does the word "{row.text("word")}" have the same meaning in these two sentences? Yes, No?\n'
            f"{row.text('sentence1')}\n{row.text('sentence2')}\n"
        ),
        answers=fixed(*NO_YES),
        target=label,
    ),
    Task(
        name="wsc",
        title="WSC",
        kind="classification",
        columns=("text", "span1_text", "span2_text", "label"),
        metrics=("accuracy",),
        template=(
            '<text>\\nIn the previous sentence, does the pronoun "<span2>" refer to <span1>? Yes or No?\\n '
            "-> 0 No, 1 Yes"
        ),
        hub=HUB,
        subset="wsc.fixed",
        render=lambda row: (
            f'{row.text("text")}\nIn the previous sentence, does the pronoun "{row.text("span2_text").lower()}" '
            f"refer to {row.text('span1_text')}? Yes or No?\n"
        ),
        answers=fixed(*NO_YES),
        target=label,
    ),
    Task(
        name="multirc",
        title="MultiRC",
        kind="classification",
        columns=("paragraph", "question", "answer", "label"),
        metrics=("f1a", "em"),
        template=(
            '<paragraph>\\nQuestion: <question>\\nI found this answer "<answer>". Is that correct? Yes or No?\\n '
            "-> 0 No, 1 Yes"
        ),
        hub=HUB,
        subset="multirc",
        render=lambda row: (
            f"{row.text('paragraph')}\nQuestion: {row.text('question')}\n"
            f'I found this answer "{row.text("answer")}". Is that correct? Yes or No?\n'
        ),
        answers=fixed(*NO_YES),
        target=label,
        grouped_by=_multirc_question,
    ),
    Task(
        name="record",
        title="ReCoRD",
        kind="choice",
        columns=("passage", "query", "entities", "answers"),
        metrics=("f1", "em"),
        template='<passage>\\n<query>\\nQuestion: what is the "@placeholder"\\nAnswer: -> one of the entities',
        hub=HUB,
        subset="record",
        render=_record_prompt,
        answers=lambda row: [" " + entity for entity in _entities(row)],
        target=_record_gold,
        train_on="answer",
        accepted=lambda row: row.texts("answers"),
    ),
    Task(
        name="squad",
        title="SQuAD",
        kind="answer",
        columns=("context", "question", "answers"),
        metrics=("f1", "em"),
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
