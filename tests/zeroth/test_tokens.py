"""Where the prompt ends and the answer begins, also for tokenizers that merge across that boundary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import RequestError
from trimtab.zeroth.tokens import encode_example, starts_with


class ToyBPE:
    """Characters, joined greedily from the left into the pieces that it knows."""

    def __init__(
        self, pieces: Sequence[str], bos: int | None = None, eos: int | None = None, closes: bool = True
    ) -> None:
        self.pieces, self.closes = sorted(pieces, key=len, reverse=True), closes
        self.bos_token_id, self.eos_token_id, self.eos_token = bos, eos, "</s>"

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [self._encode(text) for text in texts]}

    def _encode(self, text: str) -> list[int]:
        ids = [] if self.bos_token_id is None else [self.bos_token_id]
        while text:
            piece = next((p for p in self.pieces if text.startswith(p)), text[0])
            ids.append(1000 + self.pieces.index(piece) if piece in self.pieces else ord(piece))
            text = text[len(piece) :]
        return ids + ([] if self.eos_token_id is None or not self.closes else [self.eos_token_id])


def test_the_rest_after_the_prompt_is_the_candidate() -> None:
    example = encode_example(ToyBPE([" great", " bad"]), "It was", [" great", " bad", " ok"], 1)
    assert example.prompt == [ord(c) for c in "It was"]
    assert example.candidates == [[1000], [1001], [ord(c) for c in " ok"]]
    assert example.label == 1


def test_a_merged_boundary_cuts_the_prompt_back_for_all_candidates() -> None:
    # "?\n" + "Yes" becomes one piece "\nYes", while "\n" + "No" stays two.
    tokenizer = ToyBPE(["\nYes", "No"])
    example = encode_example(tokenizer, "Q?\n", ["Yes", "No"])
    assert example.prompt == [ord("Q"), ord("?")]
    assert example.candidates == [[1000], [ord("\n"), 1001]]


def test_what_the_answers_share_stays_in_the_answers() -> None:
    example = encode_example(ToyBPE([]), "a", ["xy", "xz"])
    assert example.prompt == [ord("a")]
    assert example.candidates == [[ord("x"), ord("y")], [ord("x"), ord("z")]]


def test_an_answer_without_a_token_is_an_error_that_names_the_row() -> None:
    with pytest.raises(RequestError, match=r"row 17 of d\.jsonl.*''"):
        encode_example(ToyBPE([]), "Q", ["yes", ""], where="row 17 of d.jsonl")


def test_a_prompt_without_a_token_is_an_error_that_names_the_row() -> None:
    with pytest.raises(RequestError, match="row 3"):
        encode_example(ToyBPE([]), "", ["yes", "no"], where="row 3")
    with pytest.raises(RequestError, match="row 3"):
        encode_example(ToyBPE(["Qyes"]), "Q", ["yes", "no"], where="row 3")
    # With a token at the front of every text there is something to predict from.
    assert encode_example(ToyBPE([], bos=1), "", ["yes"]).prompt == [1]


def test_an_end_token_of_the_tokenizers_own_is_not_scored() -> None:
    example = encode_example(ToyBPE([], bos=1, eos=2), "Q", ["a", "b"])
    assert example.prompt == [1, ord("Q")]
    assert example.candidates == [[ord("a")], [ord("b")]]
    # A token of the text's own is scored, also where it is that one.
    ended = encode_example(ToyBPE(["</s>"]), "Q", ["a</s>", "b</s>"])
    assert ended.candidates == [[ord("a"), 1000], [ord("b"), 1000]]


def test_one_token_for_both_ends_is_taken_for_the_front_where_it_stands() -> None:
    """As OPT has it: the end token is put before a text, and none behind it."""
    example = encode_example(ToyBPE([], bos=2, eos=2, closes=False), "", ["ab", "c"])
    assert example.prompt == [2]
    assert example.candidates == [[ord("a"), ord("b")], [ord("c")]]


def test_which_first_token_a_shortened_prompt_keeps() -> None:
    assert starts_with(ToyBPE([], bos=1)) == 1
    assert starts_with(ToyBPE([])) is None
    silent = ToyBPE([])
    silent._encode = lambda text: [5, 6]  # type: ignore[method-assign]
    silent.bos_token_id = 1  # known to the tokenizer, but not put in front
    assert starts_with(silent) is None


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@settings(deadline=None)  # a loaded machine is no finding
@given(
    prompt=st.text(min_size=1, max_size=12),
    options=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_prompt_and_candidate_are_always_the_whole_text(
    tokenizer: Any, prompt: str, options: list[str]
) -> None:
    try:
        example = encode_example(tokenizer, prompt, options)
    except RequestError:
        return
    for option, candidate in zip(options, example.candidates, strict=True):
        assert example.prompt + candidate == tokenizer([prompt + option])["input_ids"][0]
        assert candidate


def test_the_built_in_tokenizer() -> None:
    from transformers import AutoTokenizer

    from trimtab.models.builtin import builtin_folder

    tokenizer = AutoTokenizer.from_pretrained(builtin_folder())
    example = encode_example(tokenizer, "a fine film It was", [" terrible", " great"])
    assert [tokenizer.decode(c) for c in example.candidates] == [" terrible", " great"]
    assert [len(c) for c in example.candidates] == [1, 1]
    question = encode_example(tokenizer, "Is it true? Yes or No?\n", ["Yes", "No"])
    assert [len(c) for c in question.candidates] == [1, 1]
    # A prompt that ends with a space: " great" is one token of this tokenizer, "It was " + "great" would be others.
    merged = encode_example(tokenizer, "It was ", ["terrible", "great"])
    assert [tokenizer.decode(c) for c in merged.candidates] == [" terrible", " great"]
    assert tokenizer.decode(merged.prompt) == "It was"
