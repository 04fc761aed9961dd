"""Writes examples as text, then as tokens and labels. The loss falls on the assistant's answers only.

How labels are placed:
- The whole conversation is rendered once and tokenised once, with character offsets; labels are given by
  character span, so what the model sees is exactly what its tokenizer makes of the text.
- An answer's span starts where the generation prompt ends and goes through the end-of-turn token. What the
  template writes behind that token (a newline, mostly) is not trained on.
- A token that straddles the start of an answer belongs to the answer: it carries the answer's first characters.
- Labels are never derived from the pad id, so EOS is trained where pad and EOS are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trimtab.data.clean import BadRow, Tally
from trimtab.data.convert import Example, Message, is_answer
from trimtab.data.template import ChatTemplate
from trimtab.data.template_guard import must_render
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
_BATCH = 512

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """One training row as text, with the character spans that are trained on."""

    text: str
    spans: list[Span]
    example: Example


@dataclass(frozen=True)
class Encoded:
    """One training row as tokens, not cut to any length."""

    input_ids: list[int]
    labels: list[int]
    example: Example


class Renderer:
    """Turns examples into training rows for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str = "answers") -> None:
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._opening = opening_ids(tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def encode(self, examples: Sequence[Example], tally: Tally) -> list[Encoded]:
        """All examples as tokens and labels; those that cannot be written are counted in `tally`."""
        rendered = [row for example in examples for row in self._rows(example, tally)]
        encoded: list[Encoded] = []
        for start in range(0, len(rendered), _BATCH):
            encoded += self._tokens(rendered[start : start + _BATCH])
        return encoded

    def _rows(self, example: Example, tally: Tally) -> list[Rendered]:
        try:
            rows = list(self.render(example, tally))
            for row in rows:
                row.text.encode("utf-8")
            return rows
        except BadRow as bad:
            tally.bad(str(bad), example.where)
        except UnicodeEncodeError:
            tally.bad("a text holds half of a surrogate pair (broken Unicode)", example.where)
        return []

    def render(self, example: Example, tally: Tally) -> Iterator[Rendered]:
        """The example as text and spans: one row, or one per answer where the template rewrites earlier turns."""
        if example.text is not None:
            text = self._ended(example.text)
            yield Rendered(text, [(0, len(text))], example)
            return
        fitted, tools = self.template.fit(example, tally)
        answers = [place for place, message in enumerate(fitted) if is_answer(message)]
        messages = [{key: value for key, value in m.items() if key != "weight"} for m in fitted]
        whole = self.template.render(messages, tools)
        if self.train_on == "all":
            text = whole if self._answer_end(whole, 0) else self._ended(whole)
            yield Rendered(text, [(0, len(text))], example)
            return
        rows = [self._answer(messages, place, tools, whole, tally) for place in answers]
        if all(whole.startswith(text[:end]) for text, (_, end) in rows[:-1]):
            yield Rendered(rows[-1][0], [span for _, span in rows], example)
            return
        # The template writes an earlier turn differently once later ones follow (Qwen3 removes its thinking, for
        # one). With each answer last in a row of its own, every row is what the model will see.
        tally.change("conversation written as one row per answer (the chat template rewrites earlier turns)")
        for text, span in rows:
            yield Rendered(text, [span], example)

    def _answer(
        self, messages: list[Message], place: int, tools: list[Any], whole: str, tally: Tally
    ) -> tuple[str, Span]:
        """The conversation up to and with the answer at `place`, and that answer's span in it."""
        last = place + 1 == len(messages)
        text = whole if last else self.template.render(messages[: place + 1], tools)
        start = self._answer_start(messages, place, tools, text, tally)
        end = self._answer_end(text, start)
        if end is None:
            text = self._ended(text) if last else text
            end = len(text)
        return text, (start, end)

    def _answer_start(
        self, messages: list[Message], place: int, tools: list[Any], text: str, tally: Tally
    ) -> int:
        content = messages[place]["content"].strip()
        shown = text.rfind(content) if content else -1
        if place == 0:
            # Nothing to render before it: no template writes an empty conversation.
            if shown < 0:
                raise BadRow("the conversation starts with a tool call, so nothing shows where it begins")
            return shown
        prompt = self.template.render(messages[:place], tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The generation prompt holds more than the template writes before a finished answer (an opened <think>,
        # say). The answer starts where the two part, and never behind its own first character.
        tally.change("answer whose generation prompt is not how the chat template writes it")
        parted = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(text))
        return min(parted, shown) if shown >= 0 else parted

    def _answer_end(self, text: str, start: int) -> int | None:
        """Where the end-of-turn token of the answer at `start` ends, or None where the template writes none."""
        token = self.template.end_of_turn
        if token is not None and (place := text.rfind(token, start)) >= 0:
            return place + len(token)
        bare = text.rstrip()
        ends = any(bare.endswith(token, start) for token in self.template.added_tokens)
        return len(bare) if ends else None

    def _ended(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        return text if not eos or text.endswith(eos) else text + eos

    def _tokens(self, rows: Sequence[Rendered]) -> list[Encoded]:
        if not getattr(self.tokenizer, "is_fast", False):
            raise RequestError.of(
                f"the tokenizer {type(self.tokenizer).__name__} gives no character offsets",
                "labels are placed by offsets; without them the loss could fall on the wrong tokens",
                "use a model with a tokenizer.json",
            )
        batch = self.tokenizer(
            [row.text for row in rows],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        encoded = []
        for row, ids, offsets in zip(rows, batch["input_ids"], batch["offset_mapping"], strict=True):
            labels = label(ids, offsets, row.spans)
            # The template may write BOS itself; the tokenizer's own is added only where it did not.
            if self._opening and ids[: len(self._opening)] != self._opening:
                ids = self._opening + ids
                labels = [IGNORED] * len(self._opening) + labels
            encoded.append(Encoded(ids, labels, row.example))
        return encoded


def label(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """The token ids where a token touches a span, IGNORED elsewhere. Spans are in order and do not overlap."""
    labels = [IGNORED] * len(ids)
    number = 0
    reached = 0
    for place, (start, end) in enumerate(offsets):
        if start == end:
            # Some tokenizers trim spaces out of the offsets: a token of spaces covers the gap before it.
            start = min(start, reached)
        reached = max(reached, end)
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        if number == len(spans):
            break
        if end > spans[number][0] if end > start else start >= spans[number][0]:
            labels[place] = ids[place]
    return labels


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Message]) -> list[int]:
    """A prompt as tokens: text as the tokenizer opens it, messages through the chat template and nothing added."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    text = must_render(tokenizer, prompt, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text by itself: mostly BOS, or nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = (n for n in range(len(whole) - len(bare) + 1) if whole[n : n + len(bare)] == bare)
    return list(whole[: next(starts, 0)])
