"""The model's own chat template: what it can express, and how a conversation is written with it.

The template is never edited. What it has no place for (tools, tool calls, tool results, a system message) is
written in plain text where the template does have a place, and counted in the report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trimtab.data.clean import BadRow, Tally
from trimtab.data.convert import Example, Message
from trimtab.data.template_guard import TemplateRefusal, rendered
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = {"role": "user", "content": "probe question"}
_ANSWER = {"role": "assistant", "content": "probe answer"}
_SYSTEM = {"role": "system", "content": "probe rules"}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "probe"}}},
    },
}
_CALL = {"type": "function", "function": {"name": "probe_call", "arguments": {"city": "probe"}}}


class ChatTemplate:
    """Renders conversations, after a few small probes of what the template knows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise RequestError.of(
                "the model's tokenizer has no chat template",
                "conversations are written with the template of the model that is tuned",
                "set model.chat_template to a .jinja file",
            )
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self.added_tokens = sorted({str(token) for token in added} | set(tokenizer.all_special_tokens))
        plain = self._plain_conversation()
        self.end_of_turn = self._end_of_turn(plain)
        self._control = self._control_tokens(plain, [str(token) for token in added if token.special])
        self._takes_system = self._writes([_SYSTEM, _USER, _ANSWER], "probe rules")
        self._takes_tools = self._writes([_USER, _ANSWER], "probe_tool", tools=[PROBE_TOOL])
        # Some templates refuse calls without ids, so rows with and without them are asked about separately.
        self._takes_calls = {
            ids: self._writes(_called(ids), "probe_call", "probe result") for ids in (True, False)
        }
        result = {"role": "tool", "content": "probe result"}
        self._takes_results = self._writes([_USER, _ANSWER, result, _ANSWER], "probe result")

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        """The conversation as text; with `prompt`, up to where the assistant's next answer starts."""
        try:
            return rendered(self.tokenizer, messages, tools=list(tools) or None, add_generation_prompt=prompt)
        except TemplateRefusal as error:
            raise BadRow(f"the chat template refuses it ({error})") from None

    def fit(self, example: Example, tally: Tally) -> tuple[list[Message], list[dict[str, Any]]]:
        """The messages and tools of an example in the words that this template has."""
        for message in example.messages:
            if found := self._control.search(message["content"]):
                raise BadRow(
                    f"a text holds the control token {found[0]}, which the chat template writes itself"
                )
        messages, tools = [dict(message) for message in example.messages], list(example.tools)
        if tools and not self._takes_tools:
            tally.change("tools described in the system message (the chat template has no place for them)")
            _add_to_system(messages, _described(tools))
            tools = []
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        takes_calls = self._takes_calls[bool(calls) and all("id" in call for call in calls)]
        if calls and not takes_calls:
            tally.change("tool calls written as JSON text (the chat template has no place for them)")
            messages = [_call_as_text(message) for message in messages]
        if any(message["role"] == "tool" for message in messages) and not (
            self._takes_results or (calls and takes_calls)
        ):
            tally.change("tool results written as user messages (the chat template has no role for them)")
            messages = [{**m, "role": "user"} if m["role"] == "tool" else m for m in messages]
        if messages[0]["role"] == "system" and not self._takes_system:
            tally.change("system message put before the first user message (the chat template has none)")
            messages = _system_into_user(messages)
        return messages, tools

    def _writes(self, messages: list[Message], *texts: str, tools: Sequence[Any] = ()) -> bool:
        try:
            rendered = self.render(messages, tools)
        except BadRow:
            return False
        return all(text in rendered for text in texts)

    def _plain_conversation(self) -> str:
        try:
            text = self.render([_USER, _ANSWER])
        except BadRow as error:
            raise RequestError.of(
                "the model's chat template cannot write one question and one answer",
                str(error),
                "set model.chat_template to a template that can",
            ) from None
        if "probe answer" not in text:
            raise RequestError.of(
                "the model's chat template leaves out the assistant's answer",
                "there would be nothing to train on",
                "set model.chat_template to a template that writes assistant messages",
            )
        return text

    def _end_of_turn(self, plain: str) -> str | None:
        """What the template puts after an answer: the first known token behind it, with those that touch it."""
        after = plain.rpartition("probe answer")[2]
        found = [(after.index(token), -len(token), token) for token in self.added_tokens if token in after]
        if not found:
            return None
        start, _, end = min(found)
        while True:
            rest = after[start + len(end) :]
            touching = [token for token in self.added_tokens if rest.startswith(token)]
            if not touching:
                return end
            end += max(touching, key=len)

    def _control_tokens(self, plain: str, special: list[str]) -> re.Pattern[str]:
        """Special tokens that the template itself writes. Inside a text they would end or open a turn."""
        try:
            written = plain + self.render([_USER], prompt=True)
        except BadRow as error:
            raise RequestError.of(
                "the model's chat template cannot write a question alone",
                str(error),
                "set model.chat_template to a template that can",
            ) from None
        tokens = {token for token in special if token in written}
        tokens |= {token for token in self.added_tokens if token in (self.end_of_turn or "")}
        tokens |= {token for token in (self.tokenizer.eos_token, self.tokenizer.bos_token) if token}
        return re.compile("|".join(re.escape(token) for token in sorted(tokens)) or r"(?!)")


def _called(ids: bool) -> list[Message]:
    call = {"id": "probe0001", **_CALL} if ids else _CALL
    result = {"role": "tool", "name": "probe_call", "content": "probe result"}
    result |= {"tool_call_id": "probe0001"} if ids else {}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result, _ANSWER]


def _described(tools: Sequence[dict[str, Any]]) -> str:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    form = '{"name": <tool>, "arguments": {...}}'
    return "\n".join(["You can call these tools:", *lines, f"To call one, answer with JSON: {form}"])


def _add_to_system(messages: list[Message], text: str) -> None:
    if messages[0]["role"] == "system":
        messages[0]["content"] += "\n\n" + text
    else:
        messages.insert(0, {"role": "system", "content": text})


def _call_as_text(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    parts = [message["content"]] if message["content"].strip() else []
    parts += [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(parts)}


def _system_into_user(messages: list[Message]) -> list[Message]:
    rules, rest = messages[0]["content"], messages[1:]
    for place, message in enumerate(rest):
        if message["role"] == "user":
            rest[place] = {**message, "content": f"{rules}\n\n{message['content']}"}
            break
    return rest
