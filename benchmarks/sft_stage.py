"""What `sft_speed.py` trains and on what: model folders with random weights, a tokenizer, rows. Measures nothing.

Nothing is downloaded. Weights are drawn from a seed on the device; the tokenizer is a byte-level BPE that is trained
here; rows of full length are made-up words, each row with favourites of its own, so that the loss falls and differs
from row to row. Real rows (`--alpaca`) are read from where the caller says.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MADE = "made.json"
"""Written last into a model folder: it is whole."""
LEXICON, TOKENS = 2000, 8000
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
SHAPES["1B"] = SHAPES["8B"] | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": SHAPES["8B"]["rope_parameters"] | {"factor": 32.0},
}
SHAPES["tiny"] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
"""Llama-3.1-8B, Llama-3.2-1B, and one to try the benchmark with."""


def words() -> list[str]:
    """Made-up words, the same in every run."""
    draw = random.Random(7)
    parts = [c + v for c in "bcdfghjklmnprstvz" for v in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < LEXICON:
        found["".join(draw.choice(parts) for _ in range(draw.randint(1, 4)))] = None
    return list(found)


def full_rows(count: int, length: int) -> Iterator[str]:
    """Texts of more than `length` words, and so of more tokens; nine words of ten are among a row's own thirty."""
    lexicon = words()
    for number in range(count):
        draw = random.Random(number)
        own = draw.sample(lexicon, 30)
        yield " ".join(draw.choice(own if draw.random() < 0.9 else lexicon) for _ in range(length + 64))


def write_rows(path: Path, count: int, length: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in full_rows(count, length))
    return path


def write_alpaca(source: Path, path: Path) -> Path:
    """The rows of a JSON list or of JSON lines, as JSON lines."""
    text = source.read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def make_model(folder: Path, shape: str, device: str, alpaca: Path | None) -> Path:
    """A model folder as `save_pretrained` writes it; one that is whole is taken as it is, but for its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not (folder / MADE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        dtype = torch.float32 if shape == "tiny" else torch.bfloat16
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model: Any = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], bos_token_id=0, eos_token_id=1))
        finally:
            torch.set_default_dtype(before)
        model.to(dtype).save_pretrained(folder, max_shard_size="4GB")
        (folder / MADE).write_text(json.dumps({"shape": shape}), encoding="utf-8")
    make_tokenizer(SHAPES[shape]["vocab_size"], alpaca).save_pretrained(folder)
    return folder


def make_tokenizer(vocabulary: int, alpaca: Path | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(TOKENS, vocabulary),
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [" " + " ".join(words())] * 2
    if alpaca is not None:
        text += alpaca.read_text(encoding="utf-8").replace("\\n", " ").splitlines()
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


if __name__ == "__main__":
    _folder, _shape, _device, *_alpaca = sys.argv[1:]
    make_model(Path(_folder), _shape, _device, Path(_alpaca[0]) if _alpaca else None)
