"""Rows that are spoken, without sound: a small tokenizer with the marks of the Higgs Audio family, the template that
transformers' conversion gives its checkpoints (the same text for the same turns), configs that fit, codes by seed."""

from __future__ import annotations

from typing import Any

from tiny_models import config

MARKS = ["<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|audio_eos|>", "<|reserved_special_token_6|>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SCENE = ["<|scene_desc_start|>", "<|scene_desc_end|>"]
_TURN = "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
_PARTS = (
    "{% for part in m['content'] %}{% if part['type'] == 'audio' %}"
    "{{ '<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>' }}{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}"
)
_ASK = (
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>' }}{% endif %}"
)
TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% set told = namespace(scene=messages | length > 1 and messages[1]['role'] == 'scene') %}"
    "{% for m in messages %}{% if m['role'] == 'scene' and loop.index0 == 1 %}"
    "{{ '\n\n<|scene_desc_start|>\n' }}" + _PARTS + "{{ '\n<|scene_desc_end|><|eot_id|>' }}"
    "{% else %}" + _TURN + _PARTS + "{% if not (loop.first and told.scene) %}{{ '<|eot_id|>' }}{% endif %}"
    "{% endif %}{% endfor %}" + _ASK
)
"""The scene is a part of the system's turn."""
ANY_ROLE = "{{ bos_token }}{% for m in messages %}" + _TURN + _PARTS + "{{ '<|eot_id|>' }}{% endfor %}" + _ASK
"""Takes whatever role there is, and makes a turn of it."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    + _TURN
    + "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Knows texts alone, as a language model's own: parts are written out as Python shows a list."""
_WORDS = """The sun rises in the east and sets in the west. Generate audio following instruction. Audio is recorded from
a quiet room. It was the night before my birthday, and it is the best day of the year! system user assistant scene"""


def said(
    text: str,
    target: Any = None,
    reference: Any = None,
    reference_text: str | None = None,
    scene: str | None = None,
    where: str = "rows.jsonl, line 1",
) -> Any:
    """A coded row: what is said, its codes, and the codes and the words of the reference."""
    from trimtab.data.voice_collate import CodedRow
    from trimtab.data.voice_rows import VoiceRow

    return CodedRow(VoiceRow(text, None, None, reference_text, scene, None, where), reference, target)


def voice_tokenizer(
    template: str | None = TEMPLATE, special: list[str] | None = None, adds_bos: bool = False
) -> Any:
    """A byte-level tokenizer of a few hundred tokens, as Llama 3's is made."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*MARKS, *HEADERS, *SCENE] if special is None else special
    every = ["<|pad|>", "<|begin_of_text|>", "<|end_of_text|>", *special]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(every) + 320,
        special_tokens=every,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([_WORDS], trainer)
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<|pad|>",
        additional_special_tokens=special,
        chat_template=template,
    )


def voice_config(tokenizer: Any, codebooks: int = 4, entries: int = 16, **changes: Any) -> Any:
    """The tiny model's config with this tokenizer's ids, and codebooks of so many entries beside BOS and EOS."""
    ids = tokenizer.convert_tokens_to_ids
    wanted = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ids("<|eot_id|>"),
        "num_codebooks": codebooks,
        "codebook_size": entries + 2,
        "audio_stream_bos_id": entries,
        "audio_stream_eos_id": entries + 1,
        "audio_token_id": ids(MARKS[0]),
        "audio_bos_token_id": ids(MARKS[1]),
        "audio_delay_token_id": ids(MARKS[3]),
    }
    return config("higgs_audio_v2", **(wanted | changes))


def codes(frames: int, codebooks: int = 4, entries: int = 16, seed: int = 0) -> Any:
    import torch

    return torch.randint(0, entries, (frames, codebooks), generator=torch.Generator().manual_seed(seed))


def cell(clip: list[list[int]], column: int, book: int, bos: int, eos: int) -> tuple[int, int]:
    """What stands in one cell of a delayed clip, and what is to be predicted there, in so many words."""
    frame = column - book - 1
    if frame < 0:
        return bos, -100
    if frame < len(clip):
        return clip[frame][book], clip[frame][book]
    return (eos, eos) if frame == len(clip) else (eos, -100)


def plain_columns(clip: list[list[int]], books: int, bos: int, eos: int) -> tuple[list[Any], list[Any]]:
    """A delayed clip and its labels, cell by cell."""
    cells = [
        [cell(clip, column, book, bos, eos) for book in range(books)]
        for column in range(len(clip) + 2 + books - 1)
    ]
    return [[ids for ids, _ in row] for row in cells], [[label for _, label in row] for row in cells]


def own_processor(tokenizer: Any, codebooks: int = 4, entries: int = 16) -> Any:
    """transformers' own processor around this tokenizer, with a small codec of random weights."""
    import torch
    from transformers import DacConfig, DacFeatureExtractor, DacModel, HiggsAudioV2Processor

    shape = DacConfig(
        encoder_hidden_size=4,
        decoder_hidden_size=8,
        hidden_size=16,
        downsampling_ratios=[4, 4],
        upsampling_ratios=[4, 4],
        n_codebooks=codebooks,
        codebook_size=entries,
        codebook_dim=4,
    )
    shape.num_quantizers = codebooks
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        codec = DacModel(shape).eval()
    return HiggsAudioV2Processor(
        DacFeatureExtractor(feature_size=1, hop_length=1, sampling_rate=24000),
        tokenizer,
        codec,
        chat_template=TEMPLATE,
        audio_stream_bos_id=entries,
        audio_stream_eos_id=entries + 1,
    )
