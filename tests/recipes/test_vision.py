"""The vision recipe end to end on tiny models: what is asked, kept, shown, resumed and exported."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from picture_rows import drawn, question
from tiny_processors import saved_pair, tiny_pair
from trimtab.config import load_config
from trimtab.data.picture_collate import PictureCollator
from trimtab.export.run import export_run
from trimtab.models.outputs import loss_of
from trimtab.recipes.picture_trainer import answers_alone, without_cache
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder
from trimtab.report.make import make_report

COLOURS = ("red", "blue", "green", "black")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_pair("llava_onevision", tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty pictures of one colour each, asked for it."""
    folder = tmp_path_factory.mktemp("rows")
    lines = []
    for number in range(20):
        image = Image.new("RGB", (40, 30), "white")
        ImageDraw.Draw(image).rectangle(
            (2, 2, 20 + number, 12 + number // 2), fill=COLOURS[number % len(COLOURS)]
        )
        image.save(folder / f"{number}.png")
        told = {"image": f"{number}.png", "question": "which colour?", "answer": COLOURS[number % 4]}
        lines.append(json.dumps(told))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


@pytest.fixture
def settings(model: Path, rows: Path, tmp_path: Path) -> list[str]:
    return [
        *("recipe=vision", f"model={model}", f"data={rows}", "device=cpu", f"output_dir={tmp_path / 'run'}"),
        *("lora.targets=[vision, connector, all-linear]", "training.max_steps=3", "training.batch_size=4"),
        *("training.learning_rate=0.01", "training.keep_best=false", "monitor.progress=none"),
        *("data.eval_fraction=0.2", "samples.max_new_tokens=3", "vision.show=2", "data.max_length=256"),
    ]


def train(settings: list[str], *more: str) -> tuple[dict[str, Any], Path]:
    config = load_config(None, [*settings, *more])
    assert config.output_dir is not None
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda line: None)
    return summary, Path(config.output_dir)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["phase"] == "train"]


def test_a_run_answers_keeps_and_shows_its_pictures(settings: list[str]) -> None:
    summary, run = train(settings, "training.gradient_checkpointing=true")
    assert summary["status"] == "finished"
    assert summary["eval_loss"]["after"] < summary["eval_loss"]["before"]
    figures = summary["metrics"]["accuracy (exact) on 4 held-out rows"]
    assert figures["before"] == 0.0
    assert [sample["prompt"] for sample in summary["samples"]] == ["which colour?"] * 2
    for sample in summary["samples"]:
        assert sample["expected"] in COLOURS
        (name,) = sample["pictures"]
        assert Image.open(run / name).size == (40, 30)
    page = make_report(run).page
    assert page.count("<img ") == 2
    card = (run / "adapter" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "LoRA adapter by fine-tuning on pictures" in card


def test_a_run_resumed_is_the_run_that_was_not_stopped(settings: list[str], tmp_path: Path) -> None:
    whole = [*settings, "training.save_steps=2", "training.eval_steps=2", "samples.held_out=0"]
    _, straight = train(whole)
    _, run = train(whole, f"output_dir={tmp_path / 'again'}")
    resumed = f"training.resume={run}/checkpoints/checkpoint-2"
    _, again = train(whole, f"output_dir={tmp_path / 'third'}", resumed)
    assert losses(again) == losses(straight)[2:]
    kept = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (straight, again)]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "idefics3", "paligemma", "gemma3"])
def test_the_head_on_the_answers_alone_gives_the_models_own_loss_and_gradients(family: str) -> None:
    """Also where a model must be given its labels to know that it is trained (PaliGemma, Gemma 3)."""
    model, processor = tiny_pair(family)
    rows = [
        question("which colour?", "red", drawn()),
        question("say what you see there", "a blue thing", drawn(24, 44, "blue")),
    ]
    collator = PictureCollator(processor, max_length=512)
    found = []
    for collate in (collator, answers_alone(model, collator)):
        model.zero_grad()
        outputs = model.train()(**collate(rows))
        loss = loss_of(outputs)
        loss.backward()
        head = model.get_input_embeddings().weight.grad
        found.append((loss.detach(), head.clone(), outputs.logits.shape[1]))
    (whole, gradient, columns), (part, same, fewer) = found
    assert torch.allclose(whole, part, rtol=1e-5)
    assert torch.allclose(gradient, same, rtol=1e-4, atol=1e-7)
    assert fewer < columns


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "paligemma"])
def test_a_pass_of_training_keeps_no_cache(family: str) -> None:
    """It would hold every key and value of the batch, and no layer that keeps one is compiled."""
    model, processor = tiny_pair(family)
    batch = PictureCollator(processor, max_length=512)([question("which colour?", "red", drawn())])
    assert model.train()(**batch, **without_cache(model)).past_key_values is None


def test_a_model_of_ones_own_computes_its_own_loss() -> None:
    class Own(torch.nn.Module):
        def forward(self, input_ids: Any, logits_to_keep: int = 0) -> Any: ...

    def collate(rows: Any) -> Any: ...

    assert "logits_to_keep" in inspect.signature(Own().forward).parameters
    assert answers_alone(Own(), collate) is collate
    assert without_cache(Own()) == {}


def test_the_kept_model_is_asked_about_another_picture(
    trimtab: Callable[..., subprocess.CompletedProcess[str]], settings: list[str], tmp_path: Path
) -> None:
    _, run = train(settings)
    Image.new("RGBA", (30, 50), "red").save(tmp_path / "other.png")
    done = trimtab("ask", str(run), "which colour?", "--picture", str(tmp_path / "other.png"))
    assert done.returncode == 0, done.stderr
    missing = trimtab("ask", str(run), "what?", "--picture", str(tmp_path / "none.png"))
    assert missing.returncode == 2
    assert "no such file" in missing.stderr


def test_an_export_holds_the_whole_model(settings: list[str]) -> None:
    """Tower and connector with what was trained there: the merged model says what the adapter over its base says."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    _, run = train(settings, "samples.held_out=0")
    merged = export_run(run, "merged", dtype="f32").folder
    config = load_config(run / "config.yaml", [])
    base = AutoModelForImageTextToText.from_pretrained(config.model.name, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    whole = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    _, processor = tiny_pair("llava_onevision")
    batch = PictureCollator(processor, max_length=256)([question("which?", "red", drawn())])
    with torch.no_grad():
        assert torch.allclose(adapted(**batch).logits, whole(**batch).logits, atol=1e-4)
    assert (merged / "processor_config.json").is_file() or AutoProcessor.from_pretrained(merged)
    with pytest.raises(Exception, match="language model alone"):
        export_run(run, "ollama")


@pytest.mark.parametrize("broken", ["missing", "text", "empty answer"])
def test_a_bad_row_is_named_before_anything_is_trained(
    settings: list[str], rows: Path, tmp_path: Path, broken: str
) -> None:
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for line in lines:
        line["image"] = str(rows.parent / line["image"])
    if broken == "empty answer":
        lines[7]["answer"] = " "
    else:
        lines[7]["image"] = str(tmp_path / "broken.png")
    if broken == "text":
        (tmp_path / "broken.png").write_text("no picture")
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(Exception, match=r"own\.jsonl, line 8"):
        train(settings, f"data={own}", f"data.media_root={rows.parent}")
    allowed = f"data.media_root={rows.parent}"
    summary, run = train(settings, f"data={own}", allowed, "data.bad_rows=drop", "samples.held_out=0")
    assert summary["train_rows"] + summary["eval_rows"] == 19
    assert sum(json.loads((run / "data.json").read_text())["train"]["dropped"].values()) == 1


def test_text_comes_before_the_first_picture(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tower takes part from the first step on, with gradients of noughts; that it learns is seen with a picture.

    The first picture moves one factor of each adapter, and only the second shows that the other gets its gradient.
    """
    told = [json.loads(line) for line in rows.read_text().splitlines()[:2]]
    lines = []
    for number in range(16):
        seen = number in (3, 11)
        picture = [str(rows.parent / told[0]["image"])] * seen
        asked: list[dict[str, str]] = [{"type": "image"}] * seen + [{"type": "text", "text": f"{number}?"}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"it is {number}"}]
        lines.append(json.dumps({"messages": messages, "images": picture}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = [
        *("recipe=vision", f"model={model}", f"data={tmp_path / 'rows.jsonl'}", "device=cpu"),
        *("lora.targets=[vision, connector, all-linear]", "training.batch_size=1", "training.epochs=1"),
        *("training.keep_best=false", "monitor.progress=none", "data.eval_fraction=0", "data.max_length=256"),
        *(f"output_dir={tmp_path / 'run'}", f"data.media_root={rows.parent}"),
    ]
    summary, _ = train(settings)
    assert (summary["status"], summary["steps"]) == ("finished", 16)
    said = capsys.readouterr().err
    assert "20 modules wait for the first batch with more than text" in said
    assert "gradients later" in said
    assert "not seen yet" not in said
