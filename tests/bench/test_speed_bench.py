"""`trimtab bench speed`: steps beside their bare forwards, and the way to a target. No test here asserts a time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from trimtab.bench.cells import Cell, _Runner, _stream, bare_passes, measure, random_examples
from trimtab.bench.glue_cell import GlueRequest
from trimtab.bench.methods import METHODS
from trimtab.bench.speed import figures, run_speed, to_target
from trimtab.bench.stand import StandRequest, finish
from trimtab.errors import RequestError
from trimtab.monitor.progress import Quiet
from trimtab.placement import PlacementPlan
from trimtab.zeroth.objective import build_batch


def quiet() -> Quiet:
    return Quiet(Console(stderr=True))


def request(model: Path, **more: Any) -> StandRequest:
    settings = {"batch_sizes": (2,), "lengths": (8,), "device": "cpu", "isolated": False, "steps": 2}
    return StandRequest(model=(str(model),), **{**settings, **more})


@pytest.mark.parametrize(
    ("name", "passes", "rounds"),
    [
        ("inference", 1, False),
        ("lora", 1, False),
        ("mezo", 2, False),
        ("dizo", 2, True),
        ("fzoo-lora", 9, False),
    ],
)
def test_every_timed_step_has_its_bare_forwards_beside_it(
    tiny_model: Path, name: str, passes: int, rounds: bool
) -> None:
    cell = Cell(
        model=str(tiny_model),
        random=False,
        method=name,
        batch=2,
        length=8,
        device="cpu",
        steps=3,
        iterations=2,
    )
    found = measure(cell)
    assert found["passes"] == passes
    assert len(found["step_seconds"]) == len(found["bare_seconds"]) == 3
    assert min(found["step_seconds"] + found["bare_seconds"]) > 0
    assert (found["round_seconds"] is not None) is rounds
    assert found["round_passes"] == (4 if rounds else 0)
    assert found["idle_steps"] == 0


def test_a_round_of_dizo_is_timed_however_few_the_steps(tiny_model: Path) -> None:
    cell = Cell(
        model=str(tiny_model),
        random=False,
        method="dizo",
        batch=2,
        length=8,
        device="cpu",
        warm_up=3,
        steps=1,
        iterations=1,
    )
    found = measure(cell)
    assert found["round_seconds"] > 0
    assert found["round_passes"] == 2
    assert len(found["step_seconds"]) == 3


@pytest.mark.parametrize(("name", "format"), [("full", torch.bfloat16), ("mezo", torch.float32)])
def test_the_floor_of_a_step_is_in_the_formats_that_the_step_computes_in(
    tiny_model: Path, name: str, format: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    cell = Cell(model=str(tiny_model), random=False, method=name, batch=2, length=8)
    plan = PlacementPlan(
        device="cpu", precision="bf16", scaler=False, weight_precision="fp32", strategy="single"
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    runner = _Runner(model, METHODS[name], _stream(model, cell), cell, plan)
    seen: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    runner.step()
    of_the_step = set(seen)
    seen.clear()
    runner.bare()
    assert set(seen) == of_the_step == {format}


@pytest.mark.parametrize(("groups", "rows"), [([2], [6]), ([1, 1], [3, 3]), ([4, 4, 1], [12, 12, 3])])
def test_bare_forwards_are_as_many_and_as_large_as_the_step_makes_them(
    tiny_model: Path, groups: list[int], rows: list[int]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    seen: list[tuple[int, int]] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[:2])))
    batch = build_batch(random_examples(200, 3, 8), pad_id=0, max_length=9)
    bare_passes(model, batch, groups)()
    assert seen == [(count, 1) for count in rows]  # the answer's position alone goes through the head
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_figures_share_rounds_out_over_the_steps_between_them() -> None:
    cell = {
        "step_seconds": [3.0, 2.0, 2.0],
        "bare_seconds": [1.0, 1.0, 9.0],
        "passes": 2,
        "round_seconds": None,
        "round_passes": 0,
    }
    plain = figures(cell, 50)
    assert (plain["step"], plain["floor"], plain["ratio"], plain["whole"]) == (2.0, 1.0, 2.0, 2.0)
    assert plain["forwards_per_second"] == 1.0
    rounds = figures({**cell, "round_seconds": 20.0, "round_passes": 20}, 10)
    assert (rounds["step"], rounds["whole"]) == (2.0, 4.0)
    assert rounds["forwards_per_second"] == pytest.approx((2 + 2) / 4)


def curve_cell(*scores: float | None) -> dict[str, Any]:
    curve = [
        {
            "step": 10 * n,
            "forwards": 20 * n,
            "backwards": 0,
            "seconds": 1.5 * n,
            "metrics": {"accuracy": s, "f1": 1.0},
        }
        for n, s in enumerate(scores, 1)
    ]
    return {
        "task": "sst2",
        "method": "mezo",
        "seed": 0,
        "status": "finished",
        "curve": curve,
        "metrics": curve[-1]["metrics"],
    }


def test_target_is_read_from_the_first_point_that_reaches_it() -> None:
    reached = to_target(curve_cell(0.5, 0.8, 0.7), 0.8)
    assert (reached["status"], reached["forwards"], reached["seconds"], reached["metric"]) == (
        "reached",
        40,
        3.0,
        "accuracy",
    )
    missed = to_target(curve_cell(0.5, None, 0.7), 0.8)
    assert (missed["status"], missed["best"], missed["forwards"]) == ("not reached", 0.7, 60)
    as_it_is = to_target({**curve_cell(0.9), "curve": []}, 0.8)
    assert (as_it_is["status"], as_it_is["forwards"]) == ("reached", 0)
    broken = to_target({**curve_cell(0.9), "status": "failed", "reason": "no rows"}, 0.8)
    assert (broken["status"], broken["reason"]) == ("failed", "no rows")
    assert "forwards" not in broken


def test_speed_with_a_target_runs_the_task(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = GlueRequest(
        tasks=("sst2",),
        data="sample",
        steps=2,
        train_rows=8,
        eval_rows=8,
        batch_size=2,
        max_length=64,
        interval=1,
    )
    stand, whole = run_speed(
        request(tiny_model, methods=("dizo",)), tmp_path / "out", quiet(), target=0.01, runs=runs
    )
    assert finish(stand, whole, print, as_json=False)
    assert [c["method"] for c in stand.cells] == ["inference", "dizo"]
    ways = {run["method"]: run for run in stand.more["to_target"]}
    assert set(ways) == {"zero-shot", "dizo"}
    assert ways["dizo"]["status"] == "reached"
    # The first point of the curve is after the first step, and its projection round.
    assert ways["dizo"]["forwards"] == 2 + 20
    shown = capsys.readouterr().out
    assert "## To 1 %" in shown
    kept = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert kept["to_target"] == stand.more["to_target"]
    assert len(stand.render(stand)[1]) == 1
    assert (tmp_path / "out" / "runs" / "results.json").is_file()


def test_broken_way_to_the_target_is_a_failure_and_steps_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data" / "sst2"
    data.mkdir(parents=True)
    for split in ("train", "validation"):
        (data / f"{split}.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    runs = GlueRequest(tasks=("sst2",), data=str(tmp_path / "data"), steps=1)
    stand, whole = run_speed(
        request(tiny_model, methods=("mezo",)), tmp_path / "out", quiet(), target=0.5, runs=runs
    )
    assert {run["status"] for run in stand.more["to_target"]} == {"failed"}
    assert {c["status"] for c in stand.cells} == {"finished"}
    assert not finish(stand, whole, print, as_json=True)


def test_target_needs_one_model_with_weights(tiny_model: Path, tmp_path: Path) -> None:
    plain = GlueRequest(tasks=("sst2",))
    nowhere = GlueRequest(tasks=("sst2",), data=str(tmp_path / "none"))
    for asked, target, runs, part in (
        (StandRequest(shapes=("Qwen3-0.6B",)), 0.8, plain, "--target with --shapes"),
        (StandRequest(model=(str(tiny_model), "smollm2")), 0.8, plain, "several models"),
        (request(tiny_model), 80.0, plain, "--target 80"),
        (request(tiny_model), 0.8, nowhere, "no such folder"),
    ):
        with pytest.raises(RequestError, match=part):
            run_speed(asked, tmp_path / "out", quiet(), target=target, runs=runs)
    assert not (tmp_path / "out").exists()


def test_script_for_one_gpu_runs_on_the_cpu(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both loops see the same rows and the same loss, so their first losses agree."""
    monkeypatch.syspath_prepend(repository / "benchmarks")  # as a script has it
    spec = importlib.util.spec_from_file_location(
        "zeroth_speed", repository / "benchmarks" / "zeroth_speed.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "speed.json"
    options = ["--size", "tiny", "--device", "cpu", "--rows", "2", "--length", "8", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["zeroth_speed.py", *options, "--out", str(out)])
    assert script.main() == 0
    kept = json.loads(out.read_text(encoding="utf-8"))
    (found,) = kept["sizes"]
    assert set(found["parts"]) == {
        "inference",
        "reference MeZO",
        "our step",
        "two forwards, stacked",
        "two forwards, in turn",
    }
    assert found["our_first_loss"] == pytest.approx(found["reference_loss"], abs=0.02)
    assert kept["command"].startswith("python benchmarks/zeroth_speed.py --size tiny")
    page = (tmp_path / "speed.md").read_text(encoding="utf-8")
    assert f"**{found['of_two_forwards_stacked']:.2f}**" in page
    assert f"| **our step** | {found['parts']['our step']['ms']:.2f} |" in page
