"""Speech: codes by the model's own `generate`, sound by the codec.

One row at a time, so that no padding can change what is said. Never trains, writes nothing, and leaves the model, its
mode and the generators of random numbers as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trimtab.config.voice import VoiceSettings
from trimtab.data.delay import spoken
from trimtab.errors import RequestError
from trimtab.models.sample import answering, shown
from trimtab.models.spoken import Spoken
from trimtab.placement import PlacementPlan, bare_model, move

if TYPE_CHECKING:
    from trimtab.data.voice_collate import CodedRow, VoiceCollator

__all__ = ["Spoken", "sounded", "speak"]

NEVER = -1e4
"""The logit of what is not to be chosen: its chance is 0, yet it stays finite where `generate` bars all else."""


class _NotFinite(Exception):
    """The model computed something that is no number."""


def speak(
    model: Any,
    collator: VoiceCollator,
    codec: Any,
    rows: Sequence[CodedRow],
    plan: PlacementPlan,
    voice: VoiceSettings,
    seed: int = 0,
) -> list[Spoken]:
    """Each row's text, said as its reference sounds; the targets are not looked at.

    The same seed gives the same clip, whichever rows are spoken before it.
    """
    config: Any = bare_model(model).config
    settings = _settings(model, voice, _columns(voice, codec, config), config.eos_token_id)
    said = []
    with _sayable(model, codec.config.codebook_size):
        for row in shown(rows, len(rows)):
            batch = move(_asked(collator, row, config), plan)
            try:
                with answering(model, plan), _drawing(seed, plan):
                    columns = _generated(model, batch, settings)
            except _NotFinite:
                said.append(_nothing(codec, config, "the model computed numbers that are not finite"))
                continue
            # An EOS that comes too early in one codebook ends the clip there: no frame is whole after it.
            codes, ended = spoken(columns, config.audio_stream_bos_id, config.audio_stream_eos_id)
            said.append(sounded(codec, codes, ended))
    return said


def _columns(voice: VoiceSettings, codec: Any, config: Any) -> int:
    """How many columns the longest clip takes: a frame each, and what the delay adds."""
    frames: int = round(voice.max_seconds * codec.config.frame_rate)
    return max(1, frames) + int(config.num_codebooks)


def _settings(model: Any, voice: VoiceSettings, columns: int, end: int | None) -> Any:
    """How codes are chosen: the model's own settings, and over them what the config says."""
    settings = copy.deepcopy(model.generation_config)
    drawn = {"temperature": voice.temperature, "top_p": voice.top_p, "top_k": voice.top_k}
    given = {name: value for name, value in drawn.items() if value is not None}
    if voice.temperature == 0:
        settings.do_sample = False
        settings.temperature = settings.top_p = settings.top_k = None
        if getattr(settings, "ras_win_len", None) is not None:
            # Codes that repeat are drawn anew, also where the likeliest is taken; so often none can repeat.
            settings.ras_win_max_num_repeat = settings.ras_win_len + 1
    elif given:
        settings.do_sample = True
        settings.update(**given)
    settings.max_length, settings.max_new_tokens = None, columns
    settings.use_cache = True
    settings.return_dict_in_generate = False
    settings.eos_token_id = end  # what `generate` writes when all codebooks have ended
    return settings


def _asked(collator: VoiceCollator, row: CodedRow, config: Any) -> dict[str, Any]:
    """The prompt of one row, in the form that `generate` reads rightly."""
    batch = dict(collator.asked([row]))
    last = batch["input_ids"][0, -config.num_codebooks :]
    assert last[-1] == config.audio_bos_token_id, "a prompt ends where the model is to speak"
    if (last == config.audio_delay_token_id).any():
        raise RequestError.of(
            f"{row.row.where}: fewer than {config.num_codebooks} tokens between its reference clip and its answer",
            "transformers' generate would take the end of the reference for the end of what is said",
            "use a chat template that opens each turn with its role",
        )
    return batch


def _generated(model: Any, batch: Mapping[str, Any], settings: Any) -> torch.Tensor:
    """The columns that the model said, without those of the reference."""
    given = batch["audio_input_ids"].shape[1] if "audio_input_ids" in batch else 0
    out = model.generate(**batch, generation_config=settings)
    columns: torch.Tensor = out[0, given:].cpu()
    return columns


@contextmanager
def _sayable(model: Any, entries: int) -> Iterator[None]:
    """Only the codec's own codes and the end can be chosen: no BOS inside a clip, and no id without a sound."""
    bare = bare_model(model)
    config: Any = bare.config
    ids = torch.arange(config.codebook_size)
    barred = (ids >= min(entries, config.audio_stream_bos_id)) & (ids != config.audio_stream_eos_id)
    barred = barred.repeat(config.num_codebooks)

    def limit(_module: Any, _inputs: Any, output: Any) -> Any:
        last = output.logits[:, -1:]
        if not bool(torch.isfinite(last).all()):
            raise _NotFinite
        output.logits = last.masked_fill(barred.to(last.device), NEVER)
        return output

    hook = bare.register_forward_hook(limit)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _drawing(seed: int, plan: PlacementPlan) -> Iterator[None]:
    """Random numbers from this seed; those of the run go on afterwards as if nothing had been drawn."""
    devices = [plan.device] if plan.kind == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def sounded(codec: Any, codes: torch.Tensor, ended: bool = True) -> Spoken:
    """Codes (frames, codebooks) as the codec sounds them."""
    rate = codec.config.sample_rate
    if not len(codes):
        return Spoken(np.zeros(0, dtype=np.float32), rate, codes, ended)
    with torch.no_grad():
        values = codec.decode(codes.T[None].to(codec.device)).audio_values
    samples = values.reshape(-1).float().cpu().numpy()
    if not np.isfinite(samples).all():
        return Spoken(np.zeros(0, dtype=np.float32), rate, codes, ended, "the codec's sound is not finite")
    return Spoken(samples, rate, codes, ended)


def _nothing(codec: Any, config: Any, fault: str) -> Spoken:
    none = torch.zeros(0, config.num_codebooks, dtype=torch.long)
    return Spoken(np.zeros(0, dtype=np.float32), codec.config.sample_rate, none, False, fault)
