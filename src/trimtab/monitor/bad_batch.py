"""Keeps the batch of a step whose numbers were not finite: its tensors, and its rows for a person to read.

`nonfinite/step-7.safetensors` and `nonfinite/step-7.json` in the run's folder. What looks like a key is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.files import whole_file, write_json_whole
from trimtab.redaction import without_secrets

FOLDER = "nonfinite"
_ROWS, _CHARACTERS = 64, 400
_IGNORED = -100


def keep_batch(
    run_dir: Path, step: int, rank: int, inputs: Mapping[str, Any], processor: Any, about: Mapping[str, Any]
) -> Path:
    """Write it; where it was put."""
    from safetensors.torch import save_file

    stem = f"step-{step}" + (f"-rank{rank}" if rank else "")
    path = run_dir / FOLDER / f"{stem}.safetensors"
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    with whole_file(path) as scratch:
        # A copy of each: two names may share one memory, which the format refuses.
        save_file(
            {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}, scratch
        )
    write_json_whole(
        path.with_suffix(".json"),
        {
            **about,
            "tensors": {name: [str(value.dtype), *value.shape] for name, value in tensors.items()},
            "left_out": [name for name in inputs if name not in tensors],
            "rows": rows_of(tensors, processor),
        },
    )
    return path


def rows_of(tensors: Mapping[str, torch.Tensor], processor: Any) -> list[dict[str, Any]]:
    """The rows as text, the first of them: what was asked, and how many tokens were trained on."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "decode"):
        return []
    parts = {
        name: _apart(ids, tensors)
        for name in ("input_ids", "prompt_ids", "completion_ids")
        if (ids := tensors.get(name)) is not None and ids.dim() == 2
    }
    given = tensors.get("labels")
    labels: Sequence[torch.Tensor] = ()
    if given is not None and given.dim() == 2:
        labels = _apart(given, tensors)
    rows: list[dict[str, Any]] = []
    for number in range(min(_ROWS, max(map(len, parts.values()), default=0))):
        row: dict[str, Any] = {"row": number + 1}
        for name, held in parts.items():
            pad = tokenizer.pad_token_id
            text = tokenizer.decode(
                [token for token in held[number].tolist() if token not in (pad, _IGNORED)]
            )
            row[name.removesuffix("_ids")] = _short(without_secrets(str(text)))
        if number < len(labels):
            row["trained_tokens"] = int((labels[number][1:] != _IGNORED).sum())
        rows.append(row)
    return rows


def _apart(values: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """One tensor a row, also of rows that lie end to end."""
    lengths = tensors.get("row_lengths")
    if lengths is None or values.shape[0] != 1:
        return values.unbind()
    each, count = lengths.tolist(), len(values[0])
    # What all rows begin with may stand there once, before the rest of each.
    shared = (sum(each) - count) // (len(each) - 1) if sum(each) > count else 0
    start, rest = values[0, :shared], values[0, shared:]
    return [torch.cat((start, part)) for part in rest.split([length - shared for length in each])]


def _short(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} … {text[-half:]}"
