"""Vision runs of two processes: adapters everywhere learn, ranks stay identical, and one process makes the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from many_processes import start, trained
from PIL import Image, ImageDraw

from tiny_processors import saved_pair

ARCHITECTURES = ["llava_onevision", "qwen3_vl", "idefics3"]
COLOURS = ["red", "blue", "green", "black"]
STEPS = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mixed_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen rows with answers of different lengths, a third of them without a picture."""
    folder = tmp_path_factory.mktemp("rows")
    lines = []
    for number in range(15):
        colour = COLOURS[number % 4]
        image = Image.new("RGB", (30 + 2 * number, 40), "white")
        ImageDraw.Draw(image).ellipse((3, 3, 20 + number, 30), fill=colour)
        image.save(folder / f"{number}.png")
        seen = number % 3 != 2
        asked: list[dict[str, str]] = [{"type": "image"}] * seen + [{"type": "text", "text": f"{number}?"}]
        answer = f"it is {colour}" + " and round" * (number % 4)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages, "images": [f"{number}.png"] * seen}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


@pytest.fixture
def chartqa(shared_data: Path) -> Path:
    """Real charts, kept beside the checkout."""
    return shared_data / "chartqa" / "val.jsonl"


def settings_for(model: Path, rows: Path) -> list[str]:
    return [
        *("recipe=vision", f"model={model}", f"data={rows}", "device=cpu", "data.eval_fraction=0"),
        *("lora.targets=[vision, connector, all-linear]", "lora.r=2", "training.gradient_checkpointing=true"),
        *(f"training.max_steps={STEPS}", "training.learning_rate=0.01", "training.lr_scheduler=constant"),
        *("training.warmup_ratio=0", "monitor.progress=none", "data.max_rows=15", "data.max_length=512"),
    ]


def launch(processes: int, strategy: str, run: Path, settings: list[str]) -> list[float]:
    """The losses of a run of so many processes."""
    start(processes, "vision_run.py", [strategy, *settings, f"output_dir={run}"], run)
    return losses(run)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in trained(run)]


def witness(run: Path, rank: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    seen: tuple[list[dict[str, Any]], dict[str, torch.Tensor]] = torch.load(f"{run}-rank{rank}.pt")
    return seen


def agree(tmp_path: Path, settings: list[str], strategy: str = "data_parallel") -> None:
    """Two processes with a batch of 1 and one with a batch of 2: every row of a step is the same."""
    two, one = tmp_path / "two", tmp_path / "one"
    found = launch(2, strategy, two, [*settings, "training.batch_size=1"])
    expected = launch(1, "single", one, [*settings, "training.batch_size=2"])

    (gradients, left), (other, right) = witness(two, 0), witness(two, 1)
    assert gradients == other, "the ranks got the same gradients"
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left), "the ranks stay identical"

    for part in ("vision", "language_model", "connector"):
        assert any(told(name) == part for name in left), f"adapters in {part}"
    for name in left:
        if "lora_B" in name:
            assert gradients[0][name], f"{name} has no gradient at the first step"
        if "lora_A" in name:
            assert gradients[0][name] == 0, f"{name}: B is nought at the first step, and so is its gradient"
            assert any(step[name] for step in gradients[1:]), f"{name} never had a gradient"

    assert len(found) == len(expected) == STEPS
    # Only rounding differs at first. Adam steps by a gradient's sign, and so makes more of it from step to step.
    first = {name: norm for name, norm in witness(one, 0)[0][0].items() if norm}
    assert {name: gradients[0][name] for name in first} == pytest.approx(first, rel=1e-3, abs=1e-6)
    assert found[:2] == pytest.approx(expected[:2], rel=1e-4)
    assert found == pytest.approx(expected, rel=5e-3)
    assert min(found[-2:]) < found[0], "it learns"


def told(name: str) -> str:
    """Which part of the model an adapter is in."""
    if "connector" in name or "projector" in name or "merger" in name:
        return "connector"
    return "vision" if "vision" in name or "visual" in name else "language_model"


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_pictures_and_text_over_two_ranks(model_type: str, mixed_rows: Path, tmp_path: Path) -> None:
    model = saved_pair(model_type, tmp_path / "model")
    agree(tmp_path, settings_for(model, mixed_rows))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_real_charts_over_two_ranks(model_type: str, chartqa: Path, tmp_path: Path) -> None:
    model = saved_pair(model_type, tmp_path / "model")
    agree(tmp_path, [*settings_for(model, chartqa), "vision.dataset=chartqa"])


@pytest.mark.parametrize("model_type", ["llava_onevision", "qwen3_vl"])
def test_sharded_over_two_ranks(model_type: str, mixed_rows: Path, tmp_path: Path) -> None:
    model = saved_pair(model_type, tmp_path / "model")
    agree(tmp_path, settings_for(model, mixed_rows), "sharded")


def test_train_starts_the_processes_itself_and_all_make_the_same_steps(
    mixed_rows: Path, tmp_path: Path
) -> None:
    """Seven rows over two processes with batches of two: the last batch is filled up, and nobody waits for a step more.

    With workers, an evaluation of an odd number of rows, and a step of as many rows as was meant.
    """
    model = saved_pair("llava_onevision", tmp_path / "model")
    (tmp_path / "vision.yaml").write_text("recipe: vision\n")
    settings = [
        *settings_for(model, mixed_rows),
        *("training.max_steps=null", "training.epochs=2", "training.batch_size=2", "processes=2"),
        *("training.effective_batch_size=4", "training.dataloader_workers=1", "data.max_rows=10"),
        *("data.eval_fraction=0.3", "training.keep_best=false", "samples.held_out=3"),
        f"output_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", str(tmp_path / "vision.yaml"), *settings],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["strategy"], plan["processes"], plan["launcher"]) == ("data_parallel", 2, "torchrun")
    assert "2 × 2 × 1 = 4" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["train_rows"], summary["steps"]) == ("finished", 7, 4)
    assert summary["eval_loss"]["after"] is not None
    assert "parallelism has already been used" not in done.stderr


def test_masked_diffusion_over_two_ranks(mixed_rows: Path, tmp_path: Path) -> None:
    """A row is masked by what it is and by the step, on whichever rank it lies."""
    model = saved_pair("llava_onevision", tmp_path / "model")
    own = ["vision.objective=masked_diffusion", "vision.mask_token=<video>", "vision.answer_length=24"]
    agree(tmp_path, [*settings_for(model, mixed_rows), *own])
