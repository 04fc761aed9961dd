"""A row with pictures as the text that a model's processor takes, and the spans of its answers in that text.

How answers are found:
- The conversation is written twice by the model's own chat template: with its answers, and with a mark in the place of
  each. What stands around the marks must be what stands around the answers, character by character. A template that
  rewrites an answer (removes its thinking, say) is found out, and the row is refused rather than trained wrongly.
- An answer's span starts where the generation prompt ends and goes through the end-of-turn token. What stands before
  each answer must be what the model is prompted with for it; they may differ by white space at their end, and then the
  last answer follows the prompt as it is given.
- Where the template writes no end-of-turn token, the last answer ends with EOS.

Opens no picture, and never edits a template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.data.clean import BadRow
from trimtab.data.convert import Message
from trimtab.data.render import Span
from trimtab.data.template_guard import TemplateRefusal, rendered
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.data.pictures import PictureRow

_PROBE: list[Message] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "probe question"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "probe answer"}]},
]
_REWRITES = "the chat template rewrites an answer, or leaves it out"


@dataclass(frozen=True)
class Written:
    """A row as text, with one mark for each picture."""

    text: str
    spans: tuple[Span, ...] = ()
    """What is trained on."""
    suffix: str | None = None
    """The answer, where it is no part of the text."""
    apart: bool = False
    """Whether the answer is no part of the text; the processor then takes no row without pictures."""


class ChatText:
    """Writes rows through a chat template."""

    def __init__(self, processor: Any, template: str) -> None:
        self.tokenizer: Any = processor.tokenizer
        self.template = template
        self.marks = picture_marks(processor)
        self._mark = re.compile("|".join(map(re.escape, self.marks)))
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        # White space can be a token of its own; it never ends a turn.
        tokens = {token for token in [*added, *self.tokenizer.all_special_tokens] if token.strip()}
        closing = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
        self._closing = re.compile(rf"\s*(?:{closing})+" if closing else r"(?!)")
        self._token = re.compile(closing or r"(?!)")
        self._control = self._control_tokens()
        ending = self._ending(self._around(_PROBE, [1], ["probe answer"])[-1])
        self.ends = [token for token in ending if token.strip()] or [str(self.tokenizer.eos_token)]
        """The tokens that tell the end of an answer."""

    def asked(self, row: PictureRow) -> Written:
        """The row up to where its last answer starts."""
        messages = self._messages(row)
        if len(messages) < 2:
            raise BadRow("nothing stands before the answer that the model could be asked")
        return self._counted(Written(self._render(messages[:-1], prompt=True)), row)

    def written(self, row: PictureRow) -> Written:
        """The row up to the end of its last answer, and what of it is trained on."""
        messages = self._messages(row)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [messages[place]["content"][0]["text"] for place in places]
        around = self._around(messages, places, answers)
        ending = self._ending(around[-1])
        text, spans = "", []
        for number, (place, answer) in enumerate(zip(places, answers, strict=True)):
            text += around[number]
            start, last = len(text), place == places[-1]
            if place:
                prompt = self._render(messages[:place], prompt=True)
                if text.startswith(prompt):
                    start = len(prompt)
                elif text.rstrip() != prompt.rstrip():
                    raise BadRow(
                        f"what the chat template writes before answer {number + 1} is not what it prompts with"
                    )
                elif last:
                    text, start = prompt, len(prompt)
            text += answer
            end = _common(ending, around[number + 1]) or (self.tokenizer.eos_token or "") * last
            spans.append((start, len(text) + len(end)))
        # What the template writes behind the last answer's end is left out.
        text += end
        return self._counted(Written(text, tuple(spans)), row)

    def _messages(self, row: PictureRow) -> list[Message]:
        """The row's messages, each answer one stripped text; refused where a text could pass for the template's."""
        messages = []
        for message in row.messages:
            texts = [part["text"] for part in message["content"] if part["type"] == "text"]
            for text in texts:
                if found := self._control.search(text):
                    raise BadRow(
                        f"a text holds the control token {found[0]}, which the chat template writes itself"
                    )
            content = list(message["content"])
            if message["role"] == "assistant":
                if len(texts) != len(content):
                    raise BadRow("a picture inside an answer")
                content = [{"type": "text", "text": "".join(texts).strip()}]
                if not content[0]["text"]:
                    raise BadRow("empty answer")
            messages.append({"role": message["role"], "content": content})
        if not messages or messages[-1]["role"] != "assistant":
            raise BadRow("the last message is no answer")
        return messages

    def _around(self, messages: list[Message], places: list[int], answers: list[str]) -> list[str]:
        """What the template writes before, between and behind the answers."""
        marks = [f"[[answer number {number}]]" for number in range(len(places))]
        marked = list(messages)
        for place, mark in zip(places, marks, strict=True):
            marked[place] = {"role": "assistant", "content": [{"type": "text", "text": mark}]}
        around, rest = [], self._render(marked)
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                raise BadRow(_REWRITES)
            around.append(before)
        around.append(rest)
        expected = "".join(a + b for a, b in zip(around, [*answers, ""], strict=True))
        if self._render(messages) != expected:
            raise BadRow(_REWRITES)
        return around

    def _ending(self, after: str) -> list[str]:
        """White space and tokens that end a turn, where such a token stands behind the last answer."""
        found = self._closing.match(after)
        if found is None:
            return []
        tokens = list(self._token.finditer(found[0]))
        return [found[0][: tokens[0].start()], *(token[0] for token in tokens)]

    def _counted(self, written: Written, row: PictureRow) -> Written:
        count = len(self._mark.findall(written.text))
        if count != len(row.pictures):
            raise BadRow(
                f"{len(row.pictures)} pictures, and {count} places for them as the chat template writes the row"
            )
        return written

    def _control_tokens(self) -> re.Pattern[str]:
        """Special tokens that the template writes: inside a text they would end a turn, or pass for a picture."""
        plain = self._render(_PROBE) + self._render(_PROBE[:1], prompt=True)
        tokens = {token for token in self.tokenizer.all_special_tokens if token in plain}
        tokens |= {*self.marks, self.tokenizer.eos_token, self.tokenizer.bos_token} - {None}
        return re.compile("|".join(re.escape(token) for token in sorted(tokens)))

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            return rendered(
                self.tokenizer, messages, chat_template=self.template, add_generation_prompt=prompt
            )
        except TemplateRefusal as error:
            raise BadRow(f"the chat template refuses it ({error})") from None


class PrefixText:
    """Writes rows for PaliGemma, which has no turns: pictures and a question, read both ways, then the answer."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer: Any = processor.tokenizer
        self.marks = picture_marks(processor)
        self.ends = [str(self.tokenizer.eos_token)]
        tokens = {*self.marks, self.tokenizer.eos_token, self.tokenizer.bos_token} - {None}
        self._control = re.compile("|".join(re.escape(token) for token in sorted(tokens)))

    def asked(self, row: PictureRow) -> Written:
        """The row without its answer."""
        return Written(self.written(row).text, apart=True)

    def written(self, row: PictureRow) -> Written:
        """The row, its answer apart."""
        roles = [message["role"] for message in row.messages]
        if [role for role in roles if role != "system"] != ["user", "assistant"] or roles[-1] != "assistant":
            raise BadRow("a conversation of several turns, and PaliGemma knows one question and one answer")
        texts = []
        for message in row.messages:
            parts = [part["text"] for part in message["content"] if part["type"] == "text"]
            texts.append("\n".join(parts).strip())
            if found := self._control.search(texts[-1]):
                raise BadRow(f"a text holds the control token {found[0]}, which the processor writes itself")
        if not texts[-1]:
            raise BadRow("empty answer")
        pictures = self.marks[0] * len(row.pictures)
        return Written(pictures + "\n".join(texts[:-1]), suffix=texts[-1], apart=True)


def text_of(processor: Any) -> ChatText | PrefixText:
    """What writes rows for this processor."""
    from transformers import PaliGemmaProcessor

    if isinstance(processor, PaliGemmaProcessor):
        return PrefixText(processor)
    template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise RequestError.of(
            "the model's processor has no chat template",
            "questions and answers are written with the template of the model that is tuned",
            "set model.chat_template to a .jinja file, or choose a model that is tuned for conversations",
        )
    try:
        return ChatText(processor, template)
    except BadRow as bad:
        raise RequestError.of(
            "the model's chat template cannot write a picture, a question and an answer",
            str(bad),
            "set model.chat_template to a template that can",
        ) from None


def picture_marks(processor: Any) -> list[str]:
    """The tokens that stand for a picture in a text: before the processor widens them, or after."""
    names = ("image_token", "boi_token")
    found = [getattr(part, name, None) for part in (processor, processor.tokenizer) for name in names]
    marks = list(dict.fromkeys(str(token) for token in found if token))
    if not marks:
        raise RequestError.of(
            f"the processor {type(processor).__name__} names no token for a picture",
            "a picture's place in the text is known by that token",
            "choose a model whose processor has an `image_token`",
        )
    return marks


def _common(pieces: Sequence[str], text: str) -> str:
    """As many of the pieces as `text` starts with; nothing where that is white space alone."""
    held = ""
    for piece in pieces:
        if not text.startswith(held + piece):
            break
        held += piece
    return held if held.strip() else ""
