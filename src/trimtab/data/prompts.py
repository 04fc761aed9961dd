"""Rows as prompts for recipes that generate: text or messages, with every other column kept for the rewards.

The prompt is a column (`prompt`, `messages`, `question`, …) or a template over columns. It counts tokens and drops
what is too long, by reason and counted; it never cuts a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from trimtab.config.facts import longest_prompt
from trimtab.config.schema import Config
from trimtab.data.clean import BadRow, Tally, usable
from trimtab.data.convert import read_turns
from trimtab.data.fill import check_braces, fill
from trimtab.data.formats import parse_list
from trimtab.data.read import Row
from trimtab.data.render import prompt_ids
from trimtab.data.report import AskedReport, Lengths
from trimtab.data.sources import load_rows
from trimtab.data.split import hold_out
from trimtab.errors import RequestError

PROMPT_COLUMNS = ("prompt", "messages", "conversations", "question", "problem", "instruction", "query")
# The trainer passes these by the same names, or takes them for images and tools.
TAKEN = (
    *("prompts", "completions", "completion", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    *("image", "images", "environment", "environments"),
)

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptData:
    """Prompts to train on and to evaluate by, each with its row's other columns."""

    train: datasets.Dataset
    eval: datasets.Dataset | None
    report: AskedReport


def prepare_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptData:
    """The prompts of a run, read as every recipe reads rows."""
    data = config.data
    tally = Tally(strict=data.bad_rows == "stop")
    loaded = load_rows(data.source, data)
    asked, train, sizes = _asked_rows(loaded.rows, config, tokenizer, tally, "data.source")
    held: list[dict[str, Any]] = []
    notes, split = list(loaded.notes), "data.eval_fraction=0"
    if data.eval_source is not None:
        others = load_rows(data.eval_source, data, "data.eval_source")
        _, held, more = _asked_rows(others.rows, config, tokenizer, tally, "data.eval_source")
        sizes += more
        split = f"data.eval_source={data.eval_source}"
    elif data.eval_fraction > 0:
        # By the prompt alone: one that comes twice, under another number or answer, is on one side.
        train, held, split = hold_out(
            train, lambda row: json.dumps(row["prompt"]), data.eval_fraction, config.seed
        )
    columns = sorted({name for row in train for name in row} - {"prompt"})
    taken = {*TAKEN, *({"prompt"} if _prompt_column(loaded.rows[0], config) != "prompt" else ())}
    left = sorted({str(name) for row in loaded.rows for name in row.values} & taken)
    if left:
        notes.append(f"columns not passed to rewards, whose names the trainer uses itself: {', '.join(left)}")
    report = AskedReport(
        source=loaded.source,
        asked=asked,
        rows_train=len(train),
        rows_eval=len(held),
        split=split,
        columns=columns,
        tokens=Lengths.of(sizes),
        dropped=dict(tally.dropped.most_common()),
        first_dropped=dict(tally.first),
        notes=notes,
        chat=not isinstance(train[0]["prompt"], str),
    )
    return PromptData(_dataset(train, columns), _dataset(held, columns) if held else None, report)


def _asked_rows(
    rows: list[Row], config: Config, tokenizer: PreTrainedTokenizerBase, tally: Tally, setting: str
) -> tuple[str, list[dict[str, Any]], list[int]]:
    """How rows are asked, the rows that are kept, and the tokens of their prompts."""
    column = _prompt_column(rows[0], config)
    dropped = {*TAKEN, *({column} & {"prompt", "messages", "conversations"})}
    kept: list[dict[str, Any]] = []
    sizes: list[int] = []
    longest = longest_prompt(config)

    def made(row: Row) -> dict[str, Any]:
        prompt = _prompt(row, column, config, tally)
        return {str(k): v for k, v in row.values.items() if k not in dropped} | {"prompt": prompt}

    for row, asked in usable(rows, made, _key, tally, repeats=config.data.keep_duplicates):
        size = len(prompt_ids(tokenizer, asked["prompt"]))
        if size > longest:
            tally.drop(f"prompt longer than {longest} tokens (grpo.max_prompt_length)", row.where)
            continue
        kept.append(asked)
        sizes.append(size)
    if not kept:
        raise RequestError.of(
            f"{setting}: none of its {len(rows):,} rows can be asked",
            "; ".join(tally.reasons()),
            "repair the rows, raise grpo.max_prompt_length, or check grpo.prompt and data.columns",
        )
    return _how(kept[0]["prompt"], column, config), kept, sizes


def _prompt_column(row: Row, config: Config) -> str:
    """The column that holds the prompt; empty where a template makes it."""
    if config.grpo.prompt is not None:
        check_braces("grpo.prompt", config.grpo.prompt)
        return ""
    named = config.data.columns.get("prompt")
    candidates = (named,) if named else PROMPT_COLUMNS
    found = next((name for name in candidates if name in row.values), None)
    if found is None:
        raise RequestError.of(
            f"{row.where}: no column {' or '.join(map(repr, candidates))}",
            f"the row has {', '.join(map(str, row.values)) or 'no columns'}, and none of them is known as a prompt",
            "set data.columns: {prompt: your_column}, or grpo.prompt to a template such as '{question}'",
        )
    return found


def _prompt(row: Row, column: str, config: Config, tally: Tally) -> Prompt:
    grpo = config.grpo
    if not column:
        try:
            text = fill(grpo.prompt or "", row)
        except BadRow as bad:
            raise BadRow(f"{bad} of grpo.prompt") from None
    else:
        value = row.values.get(column)
        # Messages may be stored as JSON text; any other text that happens to be JSON is a prompt as it stands.
        listed = parse_list(value)
        if isinstance(value, list) or _are_messages(listed):
            messages = read_turns(listed, column, tally)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if not messages:
                raise BadRow(f"`{column}` holds no message to answer")
            return messages
        if column not in row.values:
            raise BadRow(f"no column `{column}`")
        if value is None or (isinstance(value, str) and not value.strip()):
            raise BadRow(f"`{column}` is empty")
        if not isinstance(value, str | int | float):
            raise BadRow(f"`{column}` is not text")
        text = str(value)
        if column == "instruction" and str(row.values.get("input") or "").strip():
            text += "\n" + str(row.values["input"])
    if not grpo.chat:
        return f"{grpo.system}\n{text}" if grpo.system else text
    system = [{"role": "system", "content": grpo.system}] if grpo.system else []
    return [*system, {"role": "user", "content": text}]


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def _how(prompt: Prompt, column: str, config: Config) -> str:
    source = f"column `{column}`" if column else f"template {config.grpo.prompt!r}"
    if isinstance(prompt, str):
        return f"{source}, text that is continued as it stands (grpo.chat=false)"
    system = config.grpo.system
    if system and prompt[0] == {"role": "system", "content": system}:
        return f"{source}, a user's message after the system message {system!r}"
    as_it_is = " as they are: grpo.system is for prompts that are text" if system else ""
    return f"{source}, as messages through the chat template{as_it_is}"


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def _dataset(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> datasets.Dataset:
    table = {name: [row.get(name) for row in rows] for name in ["prompt", *columns]}
    try:
        return datasets.Dataset.from_dict(table)
    except OverflowError:
        found, why = (
            "a whole number of more than 64 bits",
            "rows are kept as Arrow tables, which have no such number",
        )
        which = [name for name in columns if any(map(_is_too_large, table[name]))]
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        found, why = "values of different kinds", str(error).splitlines()[0]
        which = [name for name, values in table.items() if len({*map(type, values)} - {type(None)}) > 1]
    raise RequestError.of(
        f"data.source: a column holds {found} ({', '.join(which) or 'inside its lists'})",
        why,
        "write the column as text in every row, or leave it out",
    )


def _is_too_large(value: Any) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**63
