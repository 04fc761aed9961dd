"""On a GPU the steady loop of SFT waits for nothing, logs at every step included: torch itself raises where it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.config import load_config
from trimtab.fast.attention import flash_takes, no_mask, rows_attention
from trimtab.hardware import probe
from trimtab.recipes import trainer_driver
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe().gpus, reason="no CUDA device here"),
]


@pytest.mark.parametrize("more", [[], ["data.packing=true"]], ids=str)
def test_no_step_waits_for_the_device(
    more: list[str], tiny_model: Path, tiny_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    class Watching(trainer_driver.GracefulStop):
        """From the fifth step to the tenth: before, the first steps are proven, and after it the run ends."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steady = 4 <= state.global_step < 10
            torch.cuda.set_sync_debug_mode("error" if steady else "default")
            watched.extend([state.global_step] * steady)

    monkeypatch.setattr(trainer_driver, "GracefulStop", Watching)
    words = [
        *(
            f"model={tiny_model}",
            f"data={tiny_rows}",
            "device=cuda",
            "precision=bf16",
            "monitor.progress=none",
        ),
        *("training.max_steps=12", "training.batch_size=2", "training.epochs=50", "data.eval_fraction=0"),
        *(
            "training.logging_steps=1",
            "training.save_steps=12",
            "training.learning_rate=0.01",
            "data.max_length=96",
        ),
        *("samples.prompts=[]", "speed.compile=false", f"output_dir={tmp_path / 'run'}"),
    ]
    config = load_config(None, [*words, *more])
    try:
        summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert summary["status"] == "finished"
    assert watched == [4, 5, 6, 7, 8, 9]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "train"] == list(range(1, 13))


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_rows_by_flash_are_rows_by_sdpa(heads: tuple[int, int], window: int) -> None:
    """Forward and backward against fp32 row by row, rows of very different lengths, grouped heads, short windows."""
    if not flash_takes(torch.device("cuda"), torch.bfloat16, 64):
        pytest.skip("no flash kernels here")
    torch.manual_seed(3)
    lengths = [1, 130, 7, 64, 33]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = sum(lengths)
    parts = [torch.randn(1, n, total, 64) for n in (heads[0], heads[1], heads[1])]
    slope = torch.randn(1, total, heads[0], 64)
    told = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        q, k, v = (part.to(device, dtype).requires_grad_() for part in parts)
        more: dict[str, Any] = {"cu_seq_lens_q": bounds.to(device), "max_length_q": 256}
        out, _ = rows_attention(
            None, q, k, v, no_mask(device), sliding_window=window or None, is_causal=True, **more
        )
        out.backward(slope.to(device, dtype))
        assert q.grad is not None
        assert k.grad is not None
        assert v.grad is not None
        told.append([x.float().cpu() for x in (out.detach(), q.grad, k.grad, v.grad)])
    for ours, plain in zip(*told, strict=True):
        assert (ours - plain).abs().max() < 0.05 * plain.abs().max()


def test_a_compiler_makes_rows_of_other_lengths_by_the_same_code() -> None:
    """One graph for all lengths: neither bounds nor the longest row compile it again."""
    from torch._dynamo.testing import CompileCounter

    counted = CompileCounter()

    @torch.compile(backend=counted, dynamic=True, fullgraph=True)
    def attend(q: torch.Tensor, bounds: torch.Tensor, longest: int, mask: torch.Tensor) -> torch.Tensor:
        return (
            rows_attention(None, q, q, q, mask, is_causal=True, cu_seq_lens_q=bounds, max_length_q=longest)[0]
            * 2
        )

    for lengths, longest in (([3, 9], 16), ([40, 2, 5], 64), ([200, 100], 256), ([7, 8, 9, 10], 16)):
        q = torch.randn(1, 4, sum(lengths), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        attend(q, bounds, longest, no_mask("cuda")).sum().backward()
        assert q.grad is not None
        assert q.grad.isfinite().all()
    assert counted.frame_count <= 2
