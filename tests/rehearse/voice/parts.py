"""A tiny Higgs Audio v2 and rows for it: what the programs in this folder train. No fault is in here."""

import os

import torch
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

DEVICE = os.environ.get("DEVICE", "cuda")
AUDIO, BOS, DELAY, BOOKS, SIZE = 60, 61, 62, 2, 18
INPUTS = ("input_ids", "attention_mask", "audio_input_ids", "audio_input_ids_mask")


def tiny_model():
    torch.manual_seed(0)
    config = HiggsAudioV2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_codebooks=BOOKS,
        codebook_size=SIZE,
        audio_token_id=AUDIO,
        audio_bos_token_id=BOS,
        audio_delay_token_id=DELAY,
        audio_stream_bos_id=16,
        audio_stream_eos_id=17,
        pad_token_id=0,
        eos_token_id=2,
    )
    return HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)


def rows(count):
    """Words, then a clip of six columns of codes."""
    noise = torch.Generator().manual_seed(1)
    return [
        {"words": [3, 4, 5 + number], "codes": torch.randint(0, 16, (6, BOOKS), generator=noise).tolist()}
        for number in range(count)
    ]


def by_codebook(logits):
    return logits.reshape(*logits.shape[:2], BOOKS, SIZE)
