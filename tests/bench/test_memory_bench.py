"""`trimtab bench memory`: what is measured, against what, and what happens to a cell that fails."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from trimtab.bench import measure as measuring
from trimtab.bench import stand as standing
from trimtab.bench.cells import INFERENCE, Cell, measure, random_examples, run_cell
from trimtab.bench.measure import PeakMeter
from trimtab.bench.memory import ratio, run_memory
from trimtab.bench.nursery import nursery
from trimtab.bench.plots import Bars
from trimtab.bench.stand import TUNED, Stand, StandRequest, chosen_methods, finish, subjects
from trimtab.cli import app
from trimtab.errors import RequestError, TrimtabError
from trimtab.monitor.progress import Quiet
from trimtab.placement import PlacementPlan
from trimtab.zeroth.objective import build_batch

MIB = 2**20
PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def quiet() -> Quiet:
    return Quiet(Console(stderr=True))


@pytest.fixture(scope="module")
def wide_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config without weights: 16 million parameters, 62 MiB, far above what an allocator keeps back."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("shapes")
    LlamaConfig(
        vocab_size=16000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=64,
    ).save_pretrained(folder)
    return folder


def test_meter_sees_memory_that_is_gone_again() -> None:
    meter = PeakMeter(PLAN)
    meter.reset()
    held = torch.ones(64 * MIB // 4)
    assert held.sum() > 0
    del held
    peak = meter.read()
    assert 60 * MIB < peak < 120 * MIB
    meter.reset()
    assert meter.read() < 40 * MIB
    meter.close()


def test_meter_reads_now_and_then_where_the_kernel_keeps_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_reset_high_water", lambda: False)
    meter = PeakMeter(PLAN)
    assert "a shorter peak is missed" in meter.how
    meter.reset()
    held = torch.ones(64 * MIB // 4)
    for _ in range(20):
        assert held.sum() > 0
    assert meter.read() > 60 * MIB
    meter.close()


def test_rows_are_of_the_length_asked_for_with_one_position_scored() -> None:
    batch = build_batch(random_examples(100, 3, 8), pad_id=0, max_length=9)
    assert batch.input_ids.shape == (3, 8)
    assert batch.attention_mask.all()
    assert batch.keep == 1


def test_methods_differ_in_memory_as_they_should(wide_shapes: Path) -> None:
    found = {
        name: measure(Cell(model=str(wide_shapes), random=True, method=name, batch=2, length=8, device="cpu"))
        for name in (INFERENCE, "mezo", "dizo", "full")
    }
    weights = found[INFERENCE]["weights_bytes"]
    assert weights == 4 * found[INFERENCE]["parameters"] > 60 * MIB
    assert 0.9 * weights < found[INFERENCE]["peak_bytes"] < 1.6 * weights
    assert found["mezo"]["peak_bytes"] < 2 * weights
    # Gradients and Adam's two moments are as large as the weights, each.
    assert found["full"]["peak_bytes"] > 3.5 * weights
    assert [found[name]["anchor_bytes"] > 0 for name in found] == [False, False, True, False]
    assert [found[name]["tuned_parameters"] > 0 for name in found] == [False, True, True, True]
    assert [found[name]["passes"] for name in found] == [1, 2, 2, 1]
    assert "step_seconds" not in found["mezo"]


def test_failed_cell_is_listed_and_the_others_go_on(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = StandRequest(
        methods=("mezo-lora",),
        model=(str(tiny_model),),
        batch_sizes=(2,),
        lengths=(600, 8),
        device="cpu",
        isolated=False,
    )
    stand, whole = run_memory(request, tmp_path / "out", quiet())
    assert whole
    assert [c["status"] for c in stand.cells] == ["failed", "failed", "finished", "finished"]
    assert "512 positions" in stand.cells[0]["reason"]
    assert "peak_bytes" not in stand.cells[0]
    assert ratio(stand, stand.cells[2]) == 1.0
    assert not finish(stand, whole, print, as_json=False)
    shown = capsys.readouterr().out
    assert "## Failed" in shown
    assert "2 × 600, mezo-lora" in shown
    kept = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert kept["cells"] == stand.cells
    assert kept["run"]["methods"] == [INFERENCE, "mezo-lora"]
    first, second = stand.render(stand)[1]
    assert isinstance(first, Bars)
    assert isinstance(second, Bars)
    assert any(map(math.isnan, first.bars.values()))
    assert not any(map(math.isnan, second.bars.values()))


def test_interrupted_benchmark_says_so_wherever_it_is_kept(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def second_is_interrupted(cell: Cell) -> dict[str, object]:
        if cell.method != INFERENCE:
            raise KeyboardInterrupt
        return measure(cell)

    monkeypatch.setattr(standing, "measure", second_is_interrupted)
    request = StandRequest(
        methods=("mezo",),
        model=(str(tiny_model),),
        batch_sizes=(2,),
        lengths=(8,),
        device="cpu",
        isolated=False,
    )
    stand, whole = run_memory(request, tmp_path / "out", quiet())
    assert not finish(stand, whole, print, as_json=False)
    assert "> not whole: the benchmark was interrupted" in capsys.readouterr().out
    kept = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert (kept["run"]["whole"], len(kept["cells"])) == (False, 1)


def test_ratio_is_none_without_inference(tmp_path: Path) -> None:
    mezo = {"subject": "m", "batch": 2, "length": 8, "method": "mezo", "status": "finished", "peak_bytes": 30}
    stand = Stand(tmp_path, {}, [mezo])
    assert ratio(stand, mezo) is None
    stand.cells.append({**mezo, "method": INFERENCE, "length": 16, "peak_bytes": 20})
    assert ratio(stand, mezo) is None
    stand.cells.append({**mezo, "method": INFERENCE, "peak_bytes": 20})
    assert ratio(stand, mezo) == 1.5


def test_cells_in_processes_of_their_own(tiny_model: Path) -> None:
    cell = Cell(model=str(tiny_model), random=False, method="fzoo", batch=2, length=8, device="cpu")
    with nursery() as born_in:
        found = run_cell(cell, born_in)
        assert found["passes"] == 9
        assert found["peak_bytes"] > 0
        assert found["base_bytes"] > 50 * MIB
        with pytest.raises(TrimtabError, match="512 positions"):
            run_cell(replace(cell, length=600), born_in)
        assert run_cell(replace(cell, method=INFERENCE), born_in)["passes"] == 1


@pytest.mark.slow
def test_cell_without_a_nursery(tiny_model: Path) -> None:
    cell = Cell(model=str(tiny_model), random=False, method="fzoo", batch=2, length=8, device="cpu")
    assert run_cell(cell)["passes"] == 9


@pytest.mark.slow
def test_process_that_fails_says_why(tiny_model: Path) -> None:
    cell = Cell(model=str(tiny_model), random=False, method="mezo", batch=2, length=600, device="cpu")
    with pytest.raises(TrimtabError, match="512 positions"):
        run_cell(cell)


def test_inference_is_always_measured_and_first() -> None:
    assert chosen_methods(("all",)) == [INFERENCE, *TUNED]
    assert chosen_methods(("lora", "zero-shot", "mezo", "lora")) == [INFERENCE, "lora", "mezo"]
    with pytest.raises(RequestError, match="mezzo"):
        chosen_methods(("mezzo",))


def test_models_that_can_be_measured(
    tiny_model: Path, wide_shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "in_model_cache", lambda name: False)  # whatever was downloaded here before
    monkeypatch.setattr(standing, "hub_reachable", lambda: False)
    (folder,) = subjects(StandRequest(shapes=(str(wide_shapes),)))
    # By its whole path: two folders of one name are two models.
    assert folder.shown == f"{wide_shapes} (random weights)"
    (shape,) = subjects(StandRequest(shapes=("Qwen3-0.6B",)))
    assert (shape.name, shape.random) == ("qwen/qwen3-0.6b", True)
    (own,) = subjects(StandRequest(model=(str(tiny_model),)))
    assert (own.name, own.random) == (str(tiny_model), False)
    # Without weights and without a hub a scale is measured in its own shapes, and says so.
    (scale,) = subjects(StandRequest(scale=("medium",)))
    assert (scale.name, scale.random) == ("Qwen/Qwen3-1.7B", True)
    assert "random weights" in scale.note
    with pytest.raises(RequestError, match=r"qwen3-0\.6b"):
        subjects(StandRequest(shapes=("Qwen9-1T",)))
    with pytest.raises(RequestError, match="--shapes with --model"):
        subjects(StandRequest(shapes=("Qwen3-0.6B",), model=(str(tiny_model),)))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--length", "8,x"], "--length 8,x"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--shapes", "none-such"], "--shapes none-such"),
        (["--device", "gpu"], "device=gpu"),
    ],
)
def test_request_that_cannot_be_met_is_refused_before_anything_runs(
    options: list[str], part: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["bench", "memory", "--out", str(tmp_path / "out"), *options])
    assert isinstance(done.exception, RequestError)
    assert part in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_results_never_go_into_a_folder_in_use(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(RequestError, match="a folder of their own"):
        run_memory(StandRequest(model=(str(tiny_model),), device="cpu"), tmp_path, quiet())
    with pytest.raises(RequestError, match="cannot be written to"):
        run_memory(
            StandRequest(model=(str(tiny_model),), device="cpu"), tmp_path / "mine.txt" / "out", quiet()
        )


def test_the_command_that_is_kept_can_be_run_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["trimtab", "bench", "memory", "--out", "my folder"])
    request = StandRequest(model=(str(tiny_model),), device="cpu")
    stand = standing.open_stand("memory", request, tmp_path / "out", print)
    assert stand.header["command"] == "trimtab bench memory --out 'my folder'"
