"""Small real tokenizers with chat templates of the kinds that models ship, and helpers to write data files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = ["system user assistant tool question answer hello world the cat sat on the mat 0123456789"] * 4


def byte_level(
    template: str,
    *,
    specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    eos: str = "<|im_end|>",
    bos: str | None = None,
    adds_bos: bool = False,
    trim_offsets: bool = False,
    corpus: list[str] | None = None,
    use_regex: bool = True,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as GPT-2, Llama-3, Qwen and SmolLM2 have: it loses nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    every = [*dict.fromkeys([*specials, eos, *([bos] if bos else [])])]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=every,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus or CORPUS, trainer)
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds_bos:
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        pad_token=eos,
        additional_special_tokens=[token for token in specials if token not in (eos, bos)],
        chat_template=template,
    )


def sentencepiece_like(template: str) -> PreTrainedTokenizerFast:
    """As Llama-2 and TinyLlama have: `▁` for a space, one put before each text, bytes for the unknown, own BOS."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for character in "▁abcdefghijklmnopqrstuvwxyz<>|.":
        vocab.setdefault(character, len(vocab))
    merges = [("▁", "a"), ("▁", "h"), ("h", "e"), ("l", "l")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        chat_template=template,
    )


@pytest.fixture(scope="session", name="byte_level")
def byte_level_maker() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_level


@pytest.fixture(scope="session", name="sentencepiece_like")
def sentencepiece_maker() -> Callable[[str], PreTrainedTokenizerFast]:
    return sentencepiece_like


@pytest.fixture(scope="session")
def chatml() -> PreTrainedTokenizerFast:
    """Pad and EOS are one token, as in SmolLM2."""
    return byte_level(CHATML)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows as JSON lines and give the path."""

    def written(*rows: dict[str, Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return written


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets beside the checkout; they are not part of the project."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data sets in ../shared/data")
    return folder


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    """The bytes of a small picture of one colour, of whatever format and mode."""
    from PIL import Image

    def encoded(
        colour: Any = (200, 30, 60),
        form: str = "PNG",
        mode: str = "RGB",
        size: tuple[int, int] = (8, 6),
        **save: Any,
    ) -> bytes:
        held = io.BytesIO()
        Image.new(mode, size, colour).save(held, form, **save)
        return held.getvalue()

    return encoded


@pytest.fixture(scope="session")
def sound() -> Callable[..., bytes]:
    """The bytes of a short clip that swells and fades, or of the samples that are given, in whatever format."""
    soundfile = pytest.importorskip("soundfile", reason="clips are decoded by soundfile (extra `voice`)")

    def encoded(
        pitch: float = 220.0,
        seconds: float = 0.5,
        rate: int = 24_000,
        form: str = "WAV",
        samples: Any = None,
        subtype: str | None = None,
    ) -> bytes:
        if samples is None:
            time = np.arange(round(seconds * rate)) / rate
            samples = 0.5 * np.sin(2 * np.pi * pitch * time) * np.sin(np.pi * time / seconds)
        held = io.BytesIO()
        # A second at a time: an encoder of libsndfile runs out of stack over a long block.
        with soundfile.SoundFile(
            held, "w", rate, 1 if np.ndim(samples) == 1 else np.shape(samples)[1], subtype, format=form
        ) as file:
            for start in range(0, len(samples), rate):
                file.write(samples[start : start + rate])
        return held.getvalue()

    return encoded
