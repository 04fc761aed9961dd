"""Word errors: counted by hand and against a plain recursion; each clip heard as if it were the first."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.bench.word_errors import (
    RATE,
    Recogniser,
    WordErrors,
    edits_between,
    total,
    word_errors,
    words_of,
)
from trimtab.errors import RequestError

WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=7)


@pytest.mark.parametrize(
    ("meant", "heard", "edits", "words"),
    [
        ("the cat sat", "the cat sat", 0, 3),
        ("The cat sat.", "the cat, SAT", 0, 3),
        ("the cat sat", "the hat sat", 1, 3),
        ("the cat sat", "the sat", 1, 3),
        ("the cat sat", "the old cat sat down", 2, 3),
        ("the cat sat", "", 3, 3),
        ("the cat sat", "one two three four five", 5, 3),
        ("", "", 0, 0),
        ("", "well", 1, 0),
        ("12 apples", "twelve apples", 0, 2),
        ("don't", "dont", 1, 1),
        ("It’s late", "it's late", 0, 2),
    ],
)
def test_by_hand(meant: str, heard: str, edits: int, words: int) -> None:
    assert word_errors(meant, heard) == WordErrors(edits, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("'Hello,' she said -- twice!", "hello she said twice"),
        ("1,204 of 3", "one thousand two hundred four of three"),
        ("7, 8, 9", "seven eight nine"),
        ("room 007", "room zero zero seven"),
        ("20", "twenty"),
        ("999999999999", "nine hundred ninety nine billion nine hundred ninety nine million nine hundred ninety nine "
         "thousand nine hundred ninety nine"),
        ("1234567890123", "one two three four five six seven eight nine zero one two three"),
        ("A4 paper", "a four paper"),
        ("ﬁne…", "fine"),
        ("___ '' -", ""),
        ("Straße", "strasse"),
    ],
)  # fmt: skip
def test_words_as_a_recogniser_writes_them(text: str, words: str) -> None:
    assert words_of(text) == words.split()


@given(WORDS, WORDS)
def test_the_distance_is_that_of_its_definition(one: list[str], other: list[str]) -> None:
    @cache
    def fewest(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        same = fewest(i - 1, j - 1) + (one[i - 1] != other[j - 1])
        return min(same, fewest(i - 1, j) + 1, fewest(i, j - 1) + 1)

    assert edits_between(one, other) == fewest(len(one), len(other))
    assert edits_between(one, other) == edits_between(other, one)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=4))
def test_a_set_has_all_edits_over_all_words(pairs: list[tuple[list[str], list[str]]]) -> None:
    counts = [word_errors(" ".join(meant), " ".join(heard)) for meant, heard in pairs]
    whole = total(counts)
    words = sum(len(meant) for meant, _ in pairs)
    assert whole.words == words
    assert whole.rate == (sum(count.edits for count in counts) / words if words else None)


def test_a_recogniser_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(RequestError, match=r"trimtab\[judge\]"):
        Recogniser()


def test_the_extras_that_messages_name_are_there(repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {"judge": {"pocketsphinx", "Resemblyzer"}, "voice": {"soundfile"}}
    for extra, packages in needed.items():
        assert packages <= {re.split(r"[<>=]", package)[0] for package in extras[extra]}
    pinned = (repository / "constraints.txt").read_text()
    assert all(f"\n{package}==" in pinned for package in set().union(*needed.values()))


@pytest.fixture(scope="module")
def recogniser() -> Recogniser:
    pytest.importorskip("pocketsphinx", reason="pocketsphinx is not installed (extra `judge`)")
    return Recogniser()


def test_silence_and_nothing_are_heard_as_nothing(recogniser: Recogniser) -> None:
    assert recogniser.hear(np.zeros(0, dtype=np.float32), 24_000) == ""
    assert recogniser.hear(np.zeros(RATE, dtype=np.float32), RATE) == ""


def test_speech_is_understood_whatever_was_heard_before(
    recogniser: Recogniser, espeak: Callable[..., tuple[np.ndarray, int]]
) -> None:
    said = ["good morning", "she opened the old window and looked at the green garden"]
    clips = [espeak(text) for text in said]
    heard = [recogniser.hear(*clip) for clip in clips]
    assert [recogniser.hear(*clip) for clip in reversed(clips)] == heard[::-1]
    # Noise in place of speech is not understood, and what is said is, in part at least.
    noise = np.random.default_rng(0).normal(0, 0.1, 2 * RATE).astype(np.float32)
    right = word_errors(said[1], heard[1]).rate
    assert right is not None
    assert right < 0.8
    assert word_errors(said[1], recogniser.hear(noise, RATE)).rate >= 0.9
