"""A tiny model that speaks, prompts for it, and a codec whose sound tells its codes: what tests of speech stand on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

import tiny_models
from trimtab.data.delay import delayed, delayed_labels
from trimtab.models.voice_loss import teach_voice
from trimtab.placement import PlacementPlan

BOOKS, BOS, EOS = 4, 1024, 1025
AUDIO, AUDIO_BOS, DELAY = 100, 101, 102
PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def voice_model(**changes: Any) -> Any:
    """Random, with large weights: its choices are far apart, whatever order sums are taken in."""
    torch.manual_seed(3)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = tiny_models.skeleton("higgs_audio_v2", "cpu", rope_parameters=rope, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_audio" not in name:
                parameter.mul_(6)
    model.config.use_cache = False  # as a model that is trained comes
    return model.eval()


def clip(frames: int, seed: int = 0, codes: int = 1024) -> torch.Tensor:
    return torch.randint(0, codes, (frames, BOOKS), generator=torch.Generator().manual_seed(seed))


def row(words: Sequence[int], reference: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(
        row=SimpleNamespace(where="row 1", words=list(words)), reference=reference, target=None
    )


class Prompts:
    """Rows as the model's `generate` takes them; a word is a token."""

    def __init__(self, between: int = 4) -> None:
        self.between = between

    def asked(self, rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        (row,) = rows
        ids, columns = [7, 8], torch.zeros(0, BOOKS, dtype=torch.long)
        if row.reference is not None:
            columns = delayed(row.reference, BOS, EOS)
            ids += [AUDIO_BOS, *[AUDIO] * (len(columns) - BOOKS + 1), *[DELAY] * (BOOKS - 1)]
        tokens = torch.tensor([[*ids, *[9] * self.between, *row.row.words, AUDIO_BOS]])
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if row.reference is None:
            return batch
        mask = torch.ones(1, len(columns), dtype=torch.bool)
        return batch | {"audio_input_ids": columns[None], "audio_input_ids_mask": mask}


class Tones:
    """A codec: each frame is a tone as high as its first code."""

    device = torch.device("cpu")

    def __init__(self, entries: int = 1024, loud: float = 0.5) -> None:
        self.loud = loud
        self.config = SimpleNamespace(
            sample_rate=24_000, num_quantizers=BOOKS, codebook_size=entries, frame_rate=25
        )

    def decode(self, codes: torch.Tensor) -> Any:
        pitch = 100 + codes[0, 0].float()
        tones = self.loud * torch.sin(torch.arange(960) / 24_000 * 6.28 * pitch[:, None])
        return SimpleNamespace(audio_values=tones.reshape(1, 1, -1))


def learn(model: Any, prompt: dict[str, torch.Tensor], said: torch.Tensor, steps: int = 60) -> None:
    """Teach the model to say this clip after this prompt, and to end."""
    columns, labels = delayed(said, BOS, EOS), delayed_labels(said, EOS)
    given = prompt.get("audio_input_ids", torch.zeros(1, 0, BOOKS, dtype=torch.long))
    tokens = torch.tensor([[*[AUDIO] * (len(columns) - BOOKS + 1), *[DELAY] * (BOOKS - 1)]])
    ids = torch.cat([prompt["input_ids"], tokens], dim=1)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "audio_input_ids": torch.cat([given, columns[None]], dim=1),
        "audio_input_ids_mask": torch.ones(1, given.shape[1] + len(columns), dtype=torch.bool),
        "audio_labels": torch.cat([torch.full_like(given, -100), labels[None]], dim=1),
    }
    teach_voice(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
