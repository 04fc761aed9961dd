"""The tokenizer of the built-in models that learn from nothing: words of their task as one token each, then letters,
then bytes. No text is unknown to it, and every text comes back as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN = "<unk>"
_SPACE = "▁"
_LETTERS = [chr(code) for code in range(33, 127)]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocabulary(special: Sequence[str], words: Sequence[str]) -> list[str]:
    """All pieces, in the order of their ids; the special ones come first."""
    return [*special, *(_SPACE + word for word in words), _SPACE, *_LETTERS, *_BYTES]


def word_tokenizer(special: Sequence[str], words: Sequence[str], **settings: Any) -> PreTrainedTokenizerBase:
    """Of these special tokens, with UNKNOWN among them, and of these words; `settings` go to transformers' class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The likeliest cut wins: a word in one piece before its letters, letters before bytes.
    whole = range(len(special), len(special) + len(words))
    scored = [
        (piece, -1.0 if place in whole else -10.0) for place, piece in enumerate(vocabulary(special, words))
    ]
    made = Tokenizer(models.Unigram(scored, unk_id=special.index(UNKNOWN), byte_fallback=True))
    made.add_special_tokens(list(special))
    made.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token=UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **settings,
    )
