"""Steps that no optimizer of torch makes are counted, and end a rehearsal where as many were asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rehearse = Callable[..., dict[str, Any]]
PROGRAM = """
import torch
from trimtab.zeroth import ZerothOrder, ZerothSettings

net = torch.nn.Linear(4, 2).cuda()
x, y = torch.randn(8, 4).cuda(), torch.randint(0, 2, (8,)).cuda()

def losses(model, batch, lanes):
    rows, labels = batch[0].repeat(lanes, 1), batch[1].repeat(lanes)
    return torch.nn.functional.cross_entropy(model(rows), labels, reduction="none").view(lanes, -1)

optimizer = ZerothOrder(net, ZerothSettings(method="mezo", learning_rate=1e-2, eps=1e-2), losses)
for step in range(5):
    optimizer.step([(x, y)])
    print("made", step + 1)
"""


def test_steps_without_gradients_are_counted(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    report = rehearse_warm(str(script))
    assert report["verdict"] == "clean", report["text"]
    assert report["steps"] == 5
    ended = rehearse_warm(str(script), max_steps=2)
    assert ended["verdict"] == "clean", ended["text"]
    assert ended["steps"] == 2


@pytest.mark.slow
def test_a_zeroth_order_config_is_rehearsed_in_shapes(rehearse_warmer: Rehearse, repository: Path) -> None:
    """Captured as on a GPU, a projection included, and evaluated on the heaviest batch."""
    config = str(repository / "examples" / "zeroth-order.yaml")
    changes = (
        "device=cuda",
        "training.batch_size=4",
        "training.eval_batch_size=4",
        "training.eval_steps=1",
        "zeroth.interval=1",
    )
    found = rehearse_warmer(config, *changes, gpus=1, max_steps=2, shapes_only=True)
    assert found["verdict"] == "clean", found["text"]
    assert found["steps"] == 2
    assert not [note for note in found["notes"] if "uncaptured" in note]
