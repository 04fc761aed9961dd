"""A tokenizer as GGUF metadata, so that llama.cpp cuts text into the tokens that training saw.

Decided from the tokenizer's own structure, never from a model's name. What llama.cpp cannot do is an error.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import gguf

from trimtab.data.template_guard import must_render
from trimtab.errors import RequestError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"
LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"

# (pre-tokenizer steps, whether a whole word found in the vocabulary skips the merges) -> llama.cpp's name.
BYTE_LEVEL_PRE = {
    (("bytes+gpt2-split",), False): "gpt-2",
    (("digits", "bytes+gpt2-split"), False): "smollm",
    ((QWEN2_SPLIT, "bytes"), False): "qwen2",
    ((LLAMA3_SPLIT, "bytes"), False): "dbrx",
    ((LLAMA3_SPLIT, "bytes"), True): "llama-bpe",
}
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "▁"


@dataclass(kw_only=True)
class Vocab:
    """Everything GGUF says about a tokenizer."""

    model: str
    """`gpt2` (byte-level BPE) or `llama` (SentencePiece style)."""
    pre: str
    tokens: list[str]
    types: list[gguf.TokenType]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special_ids: dict[str, int]
    """bos, eos, unk, pad -> id."""
    add_bos: bool
    add_space_prefix: bool = False
    chat_template: str | None
    notes: list[str] = field(default_factory=list)

    def add_to(self, writer: gguf.GGUFWriter, rows: int) -> None:
        """Write the metadata, with the token list filled up to the embedding's `rows`."""
        if len(self.tokens) > rows:
            raise RequestError.of(
                f"the tokenizer has {len(self.tokens)} tokens, the embedding {rows} rows",
                "the last tokens have no weights; llama.cpp refuses such a file",
                "export with the tokenizer that the model was trained with",
            )
        missing = rows - len(self.tokens)
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens + [f"[PAD{len(self.tokens) + i}]" for i in range(missing)])
        writer.add_token_types(self.types + [gguf.TokenType.UNUSED] * missing)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores + [0.0] * missing)
        for kind, token_id in self.special_ids.items():
            getattr(writer, f"add_{kind}_token_id")(token_id)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(False)
        writer.add_add_space_prefix(self.add_space_prefix)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_vocab(tokenizer: Any) -> Vocab:
    """Describe a Hugging Face tokenizer in GGUF's terms, or raise RequestError when llama.cpp has no such one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unknown(f"{type(tokenizer).__name__} has no tokenizer.json behind it")
    spec = json.loads(backend.to_str())
    if spec["model"]["type"] != "BPE":
        raise _unknown(f"its model is {spec['model']['type']}, not BPE")
    steps = _steps(spec["pre_tokenizer"])
    if any(step.startswith("bytes") for step in steps):
        return _byte_level(tokenizer, spec, tuple(steps))
    return _sentencepiece(tokenizer, spec, steps)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts BOS before a text by itself; llama.cpp shall then do so too.

    Training rows begin with exactly one BOS in that case, written by the chat template or added. A TEMPLATE must not
    write it a second time.
    """
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a").input_ids[:1] == [bos]


def _byte_level(tokenizer: Any, spec: dict[str, Any], steps: tuple[str, ...]) -> Vocab:
    normalizer = spec["normalizer"]
    # llama.cpp does not compose accents (NFC) as Qwen's tokenizer does; text is almost always composed already.
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _unknown(f"it normalises text with {normalizer['type']}")
    ignore_merges = bool(spec["model"].get("ignore_merges"))
    pre = BYTE_LEVEL_PRE.get((steps, ignore_merges))
    if pre is None:
        raise _unknown(f"it cuts text by {list(steps)} (ignore_merges={ignore_merges})")
    vocab = _vocab(tokenizer, spec, "gpt2", pre)
    vocab.merges = [f"{left} {right}" for left, right in _merges(spec)]
    return vocab


def _sentencepiece(tokenizer: Any, spec: dict[str, Any], steps: list[str]) -> Vocab:
    if not spec["model"].get("byte_fallback"):
        raise _unknown("it is neither byte-level nor falls back to bytes")
    prefix = _space_prefix(spec["normalizer"], steps)
    vocab = _vocab(tokenizer, spec, "llama", "default")
    vocab.add_space_prefix = prefix != "never"
    for i, token in enumerate(vocab.tokens):
        if BYTE_TOKEN.fullmatch(token):
            vocab.types[i] = gguf.TokenType.BYTE
    if tokenizer.unk_token_id is not None:
        vocab.types[tokenizer.unk_token_id] = gguf.TokenType.UNKNOWN
    # llama.cpp merges the pair whose result has the highest score; Hugging Face the pair of the lowest rank.
    # Descending scores by rank make the two the same, whatever the original SentencePiece scores were.
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(spec)):
        ranks.setdefault(left + right, rank)
    vocab.scores = [-float(ranks.get(token, len(ranks))) for token in vocab.tokens]
    if prefix == "first":
        _settle_first_prefix(tokenizer, vocab)
    return vocab


def _space_prefix(normalizer: dict[str, Any] | None, steps: list[str]) -> str:
    """When a space is put before text: `always` (each stretch between special tokens), `first`, `never`."""
    found = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        found = normalizer["normalizers"]
    kinds = [step["type"] for step in found]
    if kinds in (["Prepend", "Replace"], ["Replace"]) and not steps:
        return "always" if kinds[0] == "Prepend" else "never"
    if not kinds and steps in (["metaspace-always"], ["metaspace-first"], ["metaspace-never"]):
        return steps[0].removeprefix("metaspace-")
    raise _unknown(f"it normalises by {kinds} and cuts text by {steps}")


def _settle_first_prefix(tokenizer: Any, vocab: Vocab) -> None:
    """transformers 5 puts a space before the very first text only; llama.cpp before none, or after each special.

    Which of the two is right depends on whether prompts begin with a special token.
    """
    if not tokenizer.chat_template:
        return
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    text = must_render(tokenizer, messages, add_generation_prompt=True)
    kinds = zip(vocab.tokens, vocab.types, strict=True)
    specials = [token for token, kind in kinds if kind == gguf.TokenType.CONTROL]
    if text.startswith(tuple(specials)):
        vocab.add_space_prefix = False
        vocab.notes.append(
            "chat prompts are cut as in training; a plain prompt needs a leading space to be cut as transformers does"
        )
    elif any(special in text for special in specials):
        vocab.notes.append(
            "llama.cpp puts a space before the text that follows a special token, this tokenizer does not: "
            "later turns of a conversation differ from training by one space token each"
        )


def _steps(pre: dict[str, Any] | None) -> list[str]:
    """The pre-tokenizer as a list of words: regex texts, `digits`, `bytes`, `metaspace-first`, …"""
    if pre is None:
        return []
    kind = pre["type"]
    if kind == "Sequence":
        return [step for part in pre["pretokenizers"] for step in _steps(part)]
    if kind == "ByteLevel":
        if pre["add_prefix_space"]:
            raise _unknown(
                "it puts a space before each text, which llama.cpp's byte-level tokenizer does not"
            )
        return ["bytes+gpt2-split" if pre["use_regex"] else "bytes"]
    if kind == "Digits" and pre["individual_digits"]:
        return ["digits"]
    if kind == "Split" and "Regex" in pre["pattern"] and pre["behavior"] == "Isolated" and not pre["invert"]:
        return [pre["pattern"]["Regex"]]
    if kind == "Metaspace" and pre["replacement"] == SPACE and not pre.get("split", True):
        return [f"metaspace-{pre['prepend_scheme']}"]
    return [f"{kind} {json.dumps(pre, ensure_ascii=False)}"]


def _vocab(tokenizer: Any, spec: dict[str, Any], model: str, pre: str) -> Vocab:
    """What is read in one way whatever the tokenizer's kind is."""
    by_id = {token_id: token for token, token_id in spec["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, gguf.TokenType.NORMAL)
    for added in spec["added_tokens"]:
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    count = max(by_id) + 1
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "unk", "pad")}
    return Vocab(
        model=model,
        pre=pre,
        tokens=[by_id.get(i, f"[PAD{i}]") for i in range(count)],
        types=[kinds.get(i, gguf.TokenType.UNUSED) for i in range(count)],
        special_ids={kind: token_id for kind, token_id in ids.items() if token_id is not None},
        add_bos=adds_bos(tokenizer),
        chat_template=tokenizer.chat_template,
    )


def _merges(spec: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _unknown(found: str) -> RequestError:
    return RequestError.of(
        f"the tokenizer cannot be written to GGUF: {found}",
        "llama.cpp would cut text into other tokens than training did, and answers would silently get worse",
        "use --to merged; known are byte-level BPE as in GPT-2, SmolLM2, Llama 3 and Qwen2/3, and "
        "SentencePiece-style BPE as in Llama 2",
    )
