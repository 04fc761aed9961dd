"""The nine tasks of GLUE. SST-2 and RTE are asked as MeZO asks them; the other templates are Trimtab's own.

After a prompt that ends in a line break an answer starts with its first letter; after a word it starts with a
space. Either way it begins a token of its own in the usual BPE vocabularies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trimtab.data.tasks.task import Fields, Task

YES_NO = ("Yes", "No")
NO_YES = ("No", "Yes")
_ENTAILS = '{sentence1}\nDoes this mean that "{sentence2}" is true? Yes or No?\n'
INFER = 'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n'


def fixed(*options: str) -> Callable[[Fields], Sequence[str]]:
    """The same answers for every row."""
    return lambda row: options


def built(name: str, title: str, columns: str, *metrics: str, **parts: Any) -> Task:
    """A task from what is its own. The columns stand in one text, spaces between.

    What most have in common is not said: classes by the column `label`, measured by accuracy, a subset by its name.
    """
    common: dict[str, Any] = {"kind": "classification", "subset": name, "target": Fields.label}
    common |= {"columns": tuple(columns.split()), "metrics": metrics or ("accuracy",)}
    return Task(name=name, title=title, **common | parts)


def worded(
    name: str, title: str, columns: str, prompt: str, options: Sequence[str], *metrics: str, **parts: Any
) -> Task:
    """A task whose prompt is a template over its columns, and whose answers are the same for every row."""
    shown = re.sub(r"\{(\w+)\}", r"<\1>", prompt).replace("\n", "\\n")
    ways = ", ".join(o if o == str(n) else f"{n} {o.strip()}" for n, o in enumerate(options))
    return built(
        name,
        title,
        columns,
        *metrics,
        template=f"{shown} -> {ways}",
        render=lambda row: re.sub(r"\{(\w+)\}", lambda found: row.text(found[1]), prompt),
        answers=fixed(*options),
        **parts,
    )


def _similarity_class(row: Fields) -> int:
    score = row.number("label")
    if score == -1:
        return row.label()  # hidden: said in its own words
    if not 0 <= score <= 5:
        raise row.wrong(f"label {score:g}", "STS-B scores go from 0 to 5")
    # Halves go up, so that the classes are of equal width; Python's round() would go to the even number.
    return int(score + 0.5)


_glue = partial(worded, hub="nyu-mll/glue")
_PAIR = "{sentence1}\n{sentence2}\n"

GLUE = (
    _glue(
        "cola",
        "CoLA",
        "sentence label",
        "{sentence}\nIs this sentence grammatically correct? Yes or No?\n",
        NO_YES,
        "matthews",
    ),
    _glue("sst2", "SST-2", "sentence label", "{sentence} It was", (" terrible", " great")),
    _glue(
        "mrpc",
        "MRPC",
        "sentence1 sentence2 label",
        f"{_PAIR}Do these two sentences mean the same? Yes or No?\n",
        NO_YES,
        "accuracy",
        "f1",
    ),
    _glue(
        "qqp",
        "QQP",
        "question1 question2 label|is_duplicate",
        "{question1}\n{question2}\nDo these two questions ask the same? Yes or No?\n",
        NO_YES,
        "accuracy",
        "f1",
    ),
    _glue(
        "stsb",
        "STS-B",
        "sentence1 sentence2 label|score",
        f"{_PAIR}How similar are these two sentences, from 0 to 5?\n",
        ("0", "1", "2", "3", "4", "5"),
        "pearson",
        "spearman",
        target=_similarity_class,
        regression=True,
    ),
    _glue(
        "mnli",
        "MNLI",
        "premise hypothesis label",
        INFER,
        ("Yes", "Maybe", "No"),
        splits={
            "train": "train",
            "validation": "validation_matched",
            "validation_mismatched": "validation_mismatched",
        },
    ),
    _glue(
        "qnli",
        "QNLI",
        "question sentence label",
        '{sentence}\nDoes this answer the question "{question}"? Yes or No?\n',
        YES_NO,
    ),
    _glue("rte", "RTE", "sentence1|premise sentence2|hypothesis label", _ENTAILS, YES_NO),
    _glue("wnli", "WNLI", "sentence1 sentence2 label", _ENTAILS, NO_YES),
)
