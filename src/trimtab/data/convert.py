"""Turns a row of any format into one `Example`: a conversation with its tools, or a plain text.

Knows nothing of tokenizers. A row that cannot be trained on raises BadRow with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.data.clean import BadRow, Tally, needed, text_of
from trimtab.data.formats import MISSING, Format, parse_list, value_of
from trimtab.data.read import Row

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "call",
}


def is_answer(message: Message) -> bool:
    """An assistant's message that is trained on. `weight: 0` leaves one out, as in OpenAI's files."""
    return message["role"] == "assistant" and message.get("weight") != 0


@dataclass(frozen=True)
class Example:
    """What one row teaches. Either `messages` (with `tools`) or `text` is set."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    text: str | None
    where: str

    @cached_property
    def key(self) -> str:
        """The same for two rows that teach the same thing, whatever other columns they have."""
        parts = [self.messages, self.tools, self.text]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def convert(row: Row, form: Format, mapping: Mapping[str, str], tally: Tally) -> Example:
    """The example that a row holds. `mapping` is data.columns."""

    def value(column: str) -> Any:
        found = value_of(row.values, column, mapping)
        return None if found is MISSING else found

    def name(column: str) -> str:
        return mapping.get(column, column)

    if form.name == "text":
        return Example((), (), needed(value("text"), name("text"), tally), row.where)

    messages: list[Message] = []
    if form.name == "alpaca":
        messages = _history(value("history"), name("history"), tally)
        asked = [text_of(value(column), name(column), tally) for column in ("instruction", "input")]
        asked = [part for part in asked if part.strip()]
        if not asked:
            raise BadRow(f"`{name('instruction')}` is empty")
        answer = needed(value("output"), name("output"), tally)
        messages += [{"role": "user", "content": "\n".join(asked)}, {"role": "assistant", "content": answer}]
    elif form.name == "prompt_completion":
        messages = _side(value("prompt"), name("prompt"), "user", tally)
        messages += _side(value("completion"), name("completion"), "assistant", tally)
    else:
        messages = read_turns(value(form.required[0]), name(form.required[0]), tally)

    system = text_of(value("system"), name("system"), tally) if "system" in form.columns else ""
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    messages = _up_to_last_answer(messages, tally)
    tools = _tools(value("tools"), name("tools")) if "tools" in form.columns else ()
    return Example(tuple(messages), tools, None, row.where)


def _history(value: Any, name: str, tally: Tally) -> list[Message]:
    """Alpaca's earlier rounds, `[[question, answer], ...]`; their answers are trained on too."""
    rounds = parse_list(value)
    if not rounds:
        return []
    if not isinstance(rounds, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in rounds):
        raise BadRow(f"`{name}` is not a list of [question, answer] pairs")
    said = (turn for pair in rounds for turn in zip(("user", "assistant"), pair, strict=True))
    return [{"role": role, "content": needed(text, name, tally)} for role, text in said]


def _side(value: Any, name: str, role: str, tally: Tally) -> list[Message]:
    """A prompt or a completion: plain text, or a list of messages. Answers inside a prompt are not trained on."""
    turns = parse_list(value)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return [{"role": role, "content": needed(value, name, tally)}]
    messages = read_turns(turns, name, tally)
    return [{**message, "weight": 0} for message in messages] if role == "user" else messages


def read_turns(value: Any, name: str, tally: Tally) -> list[Message]:
    """A list of messages, of either spelling."""
    turns = parse_list(value)
    if not isinstance(turns, list):
        raise BadRow(f"`{name}` is {'null' if turns is None else 'not a list of messages'}")
    if not turns:
        raise BadRow(f"`{name}` is empty")
    return [_turn(turn, name, tally) for turn in turns]


def _turn(turn: Any, name: str, tally: Tally) -> Message:
    """One message of either spelling: {role, content} or {from, value}."""
    if not isinstance(turn, Mapping):
        raise BadRow(f"`{name}` holds a {type(turn).__name__} where a message should be")
    # Parquet fills absent keys with nulls.
    turn = {key: part for key, part in turn.items() if part is not None}
    said = turn.pop("role", None) or turn.pop("from", None)
    if said is None:
        raise BadRow(f"a message in `{name}` has no role")
    role = ROLES.get(str(said).lower())
    if role is None:
        raise BadRow(f"unknown role `{said}` in `{name}`")
    value = turn.pop("value", None)
    content = turn.pop("content", value)
    if isinstance(content, Mapping) and role in ("tool", "call"):
        content = json.dumps(content, ensure_ascii=False)
        tally.change("tool call or result given as an object, written as JSON")
    text = text_of(_joined(content, name), f"{name}[{said}]", tally)
    message: Message = {"role": "assistant" if role == "call" else role, "content": text}
    calls = _calls(turn.pop("tool_calls", None) or (text if role == "call" else None))
    if calls:
        message["tool_calls"] = calls
        if role == "call":
            message["content"] = ""
    elif not text.strip() and role in ("user", "assistant"):
        raise BadRow("empty answer" if role == "assistant" else "empty user message")
    # What else a message carries (name, tool_call_id, reasoning_content, ...) is for the chat template to read.
    return {**turn, **message}


def _joined(content: Any, name: str) -> Any:
    """Content given as parts, `[{"type": "text", "text": ...}]`, as one text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"`{name}` holds a content part of kind {kind}; this recipe trains on text")
        texts.append(part["text"])
    return "".join(texts)


def _calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls in the one form that chat templates read; [] when the value is not one or several calls."""
    found = parse_list(value)
    calls = []
    for item in found if isinstance(found, list) else [found]:
        if not isinstance(item, Mapping):
            return []
        call = _function(item)
        if not isinstance(call.get("name"), str):
            return []
        arguments = parse_list(call.get("arguments"))
        whole = {"type": "function", "function": {"name": call["name"], "arguments": arguments or {}}}
        calls.append({"id": item["id"], **whole} if item.get("id") else whole)
    return calls


def _function(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a call or a tool, which may stand bare or inside {"type": "function", "function": ...}."""
    inside = item.get("function")
    return inside if isinstance(inside, Mapping) else item


def _up_to_last_answer(messages: list[Message], tally: Tally) -> list[Message]:
    answers = [place for place, message in enumerate(messages) if is_answer(message)]
    if not answers:
        raise BadRow("no answer (no assistant message to train on)")
    if answers[-1] + 1 < len(messages):
        tally.change("conversation cut after its last answer")
    return messages[: answers[-1] + 1]


def _tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """The tools of a row as the function schemas that chat templates take."""
    if isinstance(value, str) and not value.strip():
        return ()
    found = parse_list(value)
    if not found:
        return ()
    tools = []
    for tool in found if isinstance(found, list) else [found]:
        if not isinstance(tool, Mapping):
            raise BadRow(f"`{name}` is not a JSON list of tools")
        function = _function(tool)
        if not isinstance(function.get("name"), str):
            raise BadRow(f"`{name}` holds a tool without a name")
        tools.append({"type": "function", "function": _without_nulls(function)})
    return tuple(tools)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
