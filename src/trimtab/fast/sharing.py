"""Whether rows that begin alike may share what a model makes of their beginning, computed once for a whole batch.

On the CPU, where the products are what a step costs. Not where a step draws numbers at random for each token (dropout)
or counts tokens (the balance of experts, statistics of a batch): there a shared token is not the same as several. What
is left is tried on the loaded model. It raises nothing for a model that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trimtab.data.collate import Collate
from trimtab.data.shared_start import LEAST, branched
from trimtab.fast.proof import ROUNDING, ROUNDING_HALF, short_rows, undisturbed

Hidden = Callable[[Mapping[str, Any]], torch.Tensor]
"""The last hidden states of a batch."""


def may_share(bare: Any, hidden: Hidden, device: torch.device, *, half: bool) -> bool:
    """Whether rows that share their beginning come out as they do end to end."""
    if device.type != "cpu" or _told_apart(bare):
        return False
    rows = short_rows(bare.config.get_text_config())
    rows = [(rows[0] * LEAST)[:LEAST] + row for row in rows]
    examples: list[dict[str, Any]] = [{"input_ids": row, "labels": [-100] * len(row)} for row in rows]
    apart = Collate("rows", 0)(examples)
    shared = branched([(e["input_ids"], e["labels"]) for e in examples], LEAST)
    try:
        # End to end they come out as they do alone: that is proven before.
        with undisturbed(bare):
            due, together = (hidden(_given(batch))[0] for batch in (apart, shared))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # an architecture of any kind may fail by any error; rows then share nothing
        return False
    first = len(rows[0])
    due = torch.cat([due[:first], due[first + LEAST :]]).float()
    if together.shape != due.shape or not due.isfinite().all():
        return False
    off = (together.float() - due).abs().mean() / due.abs().mean().clamp(min=1e-20)
    return bool(off < (ROUNDING_HALF if half else ROUNDING))


def _given(batch: Mapping[str, Any]) -> dict[str, Any]:
    own = ("row_lengths", "labels", "head_rows", "head_labels", "items", "tokens")
    return {name: value for name, value in batch.items() if name not in own}


def _told_apart(bare: Any) -> bool:
    """Whether the same token in two rows may count as two."""
    config = bare.config.get_text_config()
    drops = any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in vars(config).items()
    )
    return (
        drops
        or bool(getattr(config, "router_aux_loss_coef", 0.0))
        or any(
            isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            or (isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0)
            for module in bare.modules()
        )
    )
