"""Tokenizers in GGUF: real llama.cpp cuts text as Hugging Face does, or the export refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_templates
import gguf
import pytest
from export_helpers import PROMPTS, LlamaCpp, byte_level_tokenizer, sentencepiece_tokenizer, tiny_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from trimtab.errors import RequestError
from trimtab.export.gguf_model import write_model
from trimtab.export.gguf_vocab import read_vocab
from trimtab.export.weights import model_entries

TEXTS = [
    *PROMPTS,
    "<|im_start|>user\nHi 42<|im_end|>\n",
    "tabs\t\tand\r\nCRLF",
    "don't DON'T it'S",
    "1234567",
    "  7",
]


@pytest.fixture(scope="module")
def small_model() -> Any:
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return tiny_model(config)


def in_llama_cpp(model: Any, tokenizer: Any, folder: Path) -> LlamaCpp:
    file = folder / "m.gguf"
    write_model(file, model.config, model_entries(model), read_vocab(tokenizer), dtype="f32", name="m")
    return LlamaCpp(file)


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "dbrx", "llama-bpe"])
def test_byte_level(kind: str, small_model: Any, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(kind)
    assert read_vocab(tokenizer).pre == kind
    cpp = in_llama_cpp(small_model, tokenizer, tmp_path)
    assert [cpp.tokens(text) for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]


@pytest.mark.parametrize("prepend", ["normalizer", "always", "first", "never"])
def test_sentencepiece(prepend: str, small_model: Any, tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(prepend)
    cpp = in_llama_cpp(small_model, tokenizer, tmp_path)
    # Metaspace adds no space before a text that begins with one, llama.cpp does: the only known difference.
    texts = TEXTS if prepend in ("normalizer", "never") else [text for text in TEXTS if text[0] != " "]
    assert [cpp.tokens(text) for text in texts] == [tokenizer(text).input_ids for text in texts]


def test_sentencepiece_types_and_scores() -> None:
    vocab = read_vocab(sentencepiece_tokenizer())
    kinds = dict(zip(vocab.tokens, vocab.types, strict=True))
    assert kinds["<unk>"] == gguf.TokenType.UNKNOWN
    assert kinds["<s>"] == kinds["</s>"] == gguf.TokenType.CONTROL
    assert kinds["<0x0A>"] == gguf.TokenType.BYTE
    assert kinds["▁t"] == gguf.TokenType.NORMAL
    scores = dict(zip(vocab.tokens, vocab.scores, strict=True))
    assert scores["▁t"] > scores["▁the"]


def test_added_tokens_are_told_apart(small_model: Any, tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_tokens(["<note>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    vocab = read_vocab(tokenizer)
    kinds = dict(zip(vocab.tokens, vocab.types, strict=True))
    assert kinds["<note>"] == gguf.TokenType.USER_DEFINED
    assert kinds["<call>"] == gguf.TokenType.CONTROL
    cpp = in_llama_cpp(small_model, tokenizer, tmp_path)
    assert cpp.tokens("a<note>b<call>c") == tokenizer("a<note>b<call>c").input_ids


@pytest.mark.parametrize(
    ("template", "add_bos"),
    [(None, True), (chat_templates.LLAMA_3, True), (chat_templates.ZEPHYR, True)],
)
def test_bos_is_added_where_the_tokenizer_adds_it(template: str | None, add_bos: bool) -> None:
    assert read_vocab(sentencepiece_tokenizer(template=template)).add_bos is add_bos
    assert read_vocab(byte_level_tokenizer("smollm")).add_bos is False


def test_chat_prompts_are_cut_as_in_training_when_they_begin_with_a_special_token(
    small_model: Any, tmp_path: Path
) -> None:
    tokenizer = sentencepiece_tokenizer("first", chat_templates.LLAMA_2)
    messages = [{"role": role, "content": f"{role} text"} for role in ("user", "assistant", "user")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    cpp = in_llama_cpp(small_model, tokenizer, tmp_path)
    assert cpp.tokens(text.removeprefix("<s>")) == tokenizer(text, add_special_tokens=False).input_ids


def test_a_space_that_llama_cpp_adds_after_special_tokens_is_said() -> None:
    assert "later turns" in read_vocab(sentencepiece_tokenizer("first", chat_templates.ZEPHYR)).notes[0]
    assert read_vocab(sentencepiece_tokenizer("always", chat_templates.ZEPHYR)).notes == []


def unusual(change: str) -> Any:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=change == "prefix")
    if change == "split":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), tokenizer.pre_tokenizer]
        )
    if change == "normalizer":
        tokenizer.normalizer = normalizers.Lowercase()
    if change == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    if change == "no bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("prefix", "a space before each text"),
        ("split", "Whitespace"),
        ("normalizer", "Lowercase"),
        ("wordpiece", "WordPiece"),
        ("no bytes", "falls back to bytes"),
    ],
)
def test_an_unknown_tokenizer_is_refused_not_guessed(change: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_vocab(unusual(change))
