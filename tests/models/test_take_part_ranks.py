"""Pictures on one rank and text alone on the other: they train together with the tower taking part, and not without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_ranks

MODELS = ["llava_onevision", "qwen3_vl", "idefics3"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def two_ranks(function: Callable[..., None], *arguments: Any) -> None:
    """Run it as `function(rank, *arguments)` in two processes, for four minutes at most."""
    context = torch.multiprocessing.start_processes(
        function, arguments, nprocs=2, join=False, start_method="spawn"
    )
    try:
        waited = 0
        while not context.join(timeout=10):
            waited += 10
            assert waited < 240, "the ranks did not come to an end"
    finally:
        for process in context.processes:
            process.kill()


def alone(model_type: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The same steps in one process that has both ranks' batches: DDP takes the mean of the ranks' gradients."""
    model = vision_ranks.adapted(model_type, helped=True)
    optimizer = vision_ranks.optimizer_of(model)
    seen = []
    for step, kinds in enumerate(vision_ranks.STEPS):
        batches = [vision_ranks.batch_of(model_type, kinds[rank], 10 * step + rank) for rank in range(2)]
        losses = [model(**batch).loss for batch in batches]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([loss.item() for loss in losses])
    return seen, vision_ranks.weights(model)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_mixed_batches_train_as_in_one_process(wrapper: str, tmp_path: Path) -> None:
    two_ranks(vision_ranks.train, str(tmp_path), MODELS, wrapper)
    for model_type in MODELS:
        left, right = (torch.load(tmp_path / f"{model_type}-{rank}.pt") for rank in range(2))
        assert left[1].keys() == right[1].keys()
        assert all(torch.equal(left[1][name], right[1][name]) for name in left[1]), "the ranks stay identical"
        losses, weights = alone(model_type)
        for step, expected in enumerate(losses):
            assert [left[0][step], right[0][step]] == pytest.approx(expected, abs=1e-3)
        start = vision_ranks.weights(vision_ranks.adapted(model_type, helped=False))
        assert all(not torch.equal(left[1][name], start[name]) for name in start), "everything was trained"
        # Adam steps by a gradient's sign, so that single weights with a gradient of rounding alone may differ.
        apart = sum(float((left[1][name] - weight).square().sum()) for name, weight in weights.items())
        moved = sum(float((start[name] - weight).square().sum()) for name, weight in weights.items())
        assert apart < 0.01 * moved


def test_without_it_ddp_waits_for_the_tower(tmp_path: Path) -> None:
    """The rank with text is done; the one with a picture waits for the tower's gradients until its time is out."""
    two_ranks(vision_ranks.left_alone, str(tmp_path), "llava_onevision", "ddp")
    assert "Timed out waiting" in (tmp_path / "ended-0").read_text()
    assert (tmp_path / "ended-1").read_text() == "finished"


def test_without_it_fsdp2_gathers_one_ranks_tower_with_the_others_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gloo sees that the shards are not of one size, and aborts or gives up; NCCL would wait."""
    try:
        two_ranks(vision_ranks.left_alone, str(tmp_path), "llava_onevision", "fsdp2")
    except torch.multiprocessing.ProcessExitedException as aborted:
        assert "SIGABRT" in str(aborted)  # noqa: PT017
        assert "collective mismatch" in capfd.readouterr().err
    else:
        told = [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)]
        assert any("mismatch" in text or "Timed out" in text for text in told), told
