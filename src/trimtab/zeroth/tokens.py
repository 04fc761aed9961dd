"""From a prompt and its possible answers, as text or as token ids, to an example, for any tokenizer that can be called.

A tokenizer may write the end of the prompt and the start of an answer as one token. Then the prompt is cut back to
where all of the example's answers still agree, so that no answer ever ends up with no token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.errors import RequestError
from trimtab.zeroth.objective import Example

Text = str | Sequence[int]
"""Words, or the ids of their tokens."""


def encode_example(
    tokenizer: Any, prompt: Text, options: Sequence[Text], label: int = -1, where: str = "this example"
) -> Example:
    """Token ids of `prompt + option` for each option, parted where the options begin. `where` names the row."""
    words = [option for option in options if isinstance(option, str)]
    if not isinstance(prompt, str) or len(words) < len(options):
        return _joined(tokenizer, prompt, options, label, where)
    texts = [prompt, *(prompt + option for option in words)]
    start, *wholes = [list(ids) for ids in tokenizer(texts)["input_ids"]]
    if _closes(tokenizer, texts, [start, *wholes]):
        # Nothing is closed before it has been scored.
        start, *wholes = [ids[:-1] for ids in (start, *wholes)]
    shared = _common_start([start, *wholes])
    for option, whole in zip(words, wholes, strict=True):
        if len(whole) == len(shared):
            raise RequestError.of(
                f"{where}: the answer {option!r} has no token of its own",
                "an answer is scored by its tokens, and this tokenizer gives it none",
                "give an answer text that is not empty, such as ' yes'",
            )
    if not shared:
        raise RequestError.of(
            f"{where}: the prompt {prompt[:40]!r} has no token before its answers",
            "a token is scored by what stands before it",
            "put text in front of the answers in the template",
        )
    return Example(shared, [whole[len(shared) :] for whole in wholes], label)


def _joined(tokenizer: Any, prompt: Text, options: Sequence[Text], label: int, where: str) -> Example:
    """Where some are tokens, these stay as they come, and words are tokenized by themselves."""
    if isinstance(prompt, str):
        (ids,) = [list(ids) for ids in tokenizer([prompt])["input_ids"]]
        start = ids[:-1] if _closes(tokenizer, [prompt], [ids]) else ids
    else:
        start = list(prompt)
    ends = [
        list(tokenizer(option, add_special_tokens=False)["input_ids"] if isinstance(option, str) else option)
        for option in options
    ]
    if not start or not all(ends):
        raise RequestError.of(
            f"{where}: {'no token in the prompt' if not start else 'a candidate without a token'}",
            "a candidate is scored by its tokens, given the prompt's",
            "give at least one token to the prompt and to each candidate",
        )
    return Example(start, ends, label)


def starts_with(tokenizer: Any) -> int | None:
    """The id that the tokenizer puts at the front of every text, which a shortened prompt has to keep."""
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer(["a"])["input_ids"][0])
    return bos if bos is not None and ids and ids[0] == bos else None


def _common_start(lists: Sequence[list[int]]) -> list[int]:
    length = 0
    for tokens in zip(*lists, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return lists[0][:length]


def _closes(tokenizer: Any, texts: Sequence[str], lists: Sequence[list[int]]) -> bool:
    """Whether the tokenizer itself puts its end token behind every text. (OPT's puts that one in front.)"""
    end, written = getattr(tokenizer, "eos_token_id", None), str(getattr(tokenizer, "eos_token", ""))
    closed = all(ids and ids[-1] == end for ids in lists)
    return closed and not all(text.endswith(written) for text in texts)
