"""The nine tasks of GLUE. SST-2 and RTE are asked as MeZO asks them; the other templates are Trimtab's own.

After a prompt that ends in a line break an answer starts with its first letter; after a word it starts with a
space. Either way it begins a token of its own in the usual BPE vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimtab.data.tasks.task import Fields, Task
from trimtab.errors import RequestError

HUB = "nyu-mll/glue"
YES_NO = ("Yes", "No")
NO_YES = ("No", "Yes")
SCORES = ("0", "1", "2", "3", "4", "5")


def fixed(*options: str) -> Callable[[Fields], Sequence[str]]:
    """The same answers for every row."""
    return lambda row: options


def label(row: Fields) -> int:
    return row.label()


def _similarity_class(row: Fields) -> int:
    score = row.number("label")
    if score == -1:
        return row.label()  # hidden: said in its own words
    if not 0 <= score <= 5:
        raise RequestError.of(
            f"{row.where}: label {score:g}", "STS-B scores go from 0 to 5", "correct the row, or leave it out"
        )
    # Halves go up, so that the classes are of equal width; Python's round() would go to the even number.
    return int(score + 0.5)


GLUE = (
    Task(
        name="cola",
        title="CoLA",
        kind="classification",
        columns=("sentence", "label"),
        metrics=("matthews",),
        template="<sentence>\\nIs this sentence grammatically correct? Yes or No?\\n -> 0 No, 1 Yes",
        hub=HUB,
        subset="cola",
        render=lambda row: f"{row.text('sentence')}\nIs this sentence grammatically correct? Yes or No?\n",
        answers=fixed(*NO_YES),
        target=label,
    ),
    Task(
        name="sst2",
        title="SST-2",
        kind="classification",
        columns=("sentence", "label"),
        metrics=("accuracy",),
        template="<sentence> It was -> 0 terrible, 1 great",
        hub=HUB,
        subset="sst2",
        render=lambda row: f"{row.text('sentence')} It was",
        answers=fixed(" terrible", " great"),
        target=label,
    ),
    Task(
        name="mrpc",
        title="MRPC",
        kind="classification",
        columns=("sentence1", "sentence2", "label"),
        metrics=("accuracy", "f1"),
        template="<sentence1>\\n<sentence2>\\nDo these two sentences mean the same? Yes or No?\\n -> 0 No, 1 Yes",
        hub=HUB,
        subset="mrpc",
        render=lambda row: (
            f"{row.text('sentence1')}\n{row.text('sentence2')}\n"
            "Do these two sentences mean the same? Yes or No?\n"
        ),
        answers=fixed(*NO_YES),
        target=label,
    ),
    Task(
        name="qqp",
        title="QQP",
        kind="classification",
        columns=("question1", "question2", "label|is_duplicate"),
        metrics=("accuracy", "f1"),
        template="<question1>\\n<question2>\\nDo these two questions ask the same? Yes or No?\\n -> 0 No, 1 Yes",
        hub=HUB,
        subset="qqp",
        render=lambda row: (
            f"{row.text('question1')}\n{row.text('question2')}\n"
            "Do these two questions ask the same? Yes or No?\n"
        ),
        answers=fixed(*NO_YES),
        target=label,
    ),
    Task(
        name="stsb",
        title="STS-B",
        kind="classification",
        columns=("sentence1", "sentence2", "label|score"),
        metrics=("pearson", "spearman"),
        template=(
            "<sentence1>\\n<sentence2>\\nHow similar are these two sentences, from 0 to 5?\\n -> 0, 1, 2, 3, 4, 5"
        ),
        hub=HUB,
        subset="stsb",
        render=lambda row: (
            f"{row.text('sentence1')}\n{row.text('sentence2')}\n"
            "How similar are these two sentences, from 0 to 5?\n"
        ),
        answers=fixed(*SCORES),
        target=_similarity_class,
        regression=True,
    ),
    Task(
        name="mnli",
        title="MNLI",
        kind="classification",
        columns=("premise", "hypothesis", "label"),
        metrics=("accuracy",),
        template=(
            'Suppose <premise> Can we infer that "<hypothesis>"? Yes, No, or Maybe?\\n -> 0 Yes, 1 Maybe, 2 No'
        ),
        hub=HUB,
        subset="mnli",
        render=lambda row: (
            f'Suppose {row.text("premise")} Can we infer that "{row.text("hypothesis")}"? Yes, No, or Maybe?\n'
        ),
        answers=fixed("Yes", "Maybe", "No"),
        target=label,
        splits={
            "train": "train",
            "validation": "validation_matched",
            "validation_mismatched": "validation_mismatched",
        },
    ),
    Task(
        name="qnli",
        title="QNLI",
        kind="classification",
        columns=("question", "sentence", "label"),
        metrics=("accuracy",),
        template='<sentence>\\nDoes this answer the question "<question>"? Yes or No?\\n -> 0 Yes, 1 No',
        hub=HUB,
        subset="qnli",
        render=lambda row: (
            f'{row.text("sentence")}\nDoes this answer the question "{row.text("question")}"? Yes or No?\n'
        ),
        answers=fixed(*YES_NO),
        target=label,
    ),
    Task(
        name="rte",
        title="RTE",
        kind="classification",
        columns=("sentence1|premise", "sentence2|hypothesis", "label"),
        metrics=("accuracy",),
        template='<sentence1>\\nDoes this mean that "<sentence2>" is true? Yes or No?\\n -> 0 Yes, 1 No',
        hub=HUB,
        subset="rte",
        render=lambda row: (
            f'{row.text("sentence1")}\nDoes this mean that "{row.text("sentence2")}" is true? Yes or No?\n'
        ),
        answers=fixed(*YES_NO),
        target=label,
    ),
    Task(
        name="wnli",
        title="WNLI",
        kind="classification",
        columns=("sentence1", "sentence2", "label"),
        metrics=("accuracy",),
        template='<sentence1>\\nDoes this mean that "<sentence2>" is true? Yes or No?\\n -> 0 No, 1 Yes',
        hub=HUB,
        subset="wnli",
        render=lambda row: (
            f'{row.text("sentence1")}\nDoes this mean that "{row.text("sentence2")}" is true? Yes or No?\n'
        ),
        answers=fixed(*NO_YES),
        target=label,
    ),
)
