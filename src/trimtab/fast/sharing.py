"""Whether rows that begin alike may share what a model makes of their beginning, computed once for a whole batch.

On the CPU, where the products are what a step costs. Not where a step draws numbers at random for each token (dropout)
or counts tokens (the balance of experts, statistics of a batch): there a shared token is not the same as several. What
is left is tried on the loaded model. It raises nothing for a model that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trimtab.data.shared_start import LEAST, branched
from trimtab.fast.proof import ROUNDING, ROUNDING_HALF, short_rows, undisturbed

Hidden = Callable[[Mapping[str, Any]], torch.Tensor]
"""The last hidden states of a batch."""


def may_share(bare: Any, hidden: Hidden, device: torch.device, *, half: bool) -> bool:
    """Whether each row of a batch comes out as it does without the others."""
    if device.type != "cpu" or _told_apart(bare):
        return False
    rows = short_rows(bare.config.get_text_config())
    rows = [(rows[0] * LEAST)[:LEAST] + row for row in rows]
    nothing = [-100] * max(map(len, rows))
    batch = branched([(row, nothing[: len(row)]) for row in rows], LEAST)
    given = {name: value for name, value in batch.items() if name not in ("row_lengths", "labels")}
    with undisturbed(bare):
        alone = [hidden({"input_ids": torch.tensor([row])})[0] for row in rows]
        try:
            together = hidden(given)[0]
        except Exception:  # an architecture of any kind may fail by any error; rows then share nothing
            return False
    due = torch.cat([alone[0], *(row[LEAST:] for row in alone[1:])]).float()
    if together.shape != due.shape or not due.isfinite().all():
        return False
    off = (together.float() - due).abs().mean() / due.abs().mean().clamp(min=1e-20)
    return bool(off < (ROUNDING_HALF if half else ROUNDING))


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
