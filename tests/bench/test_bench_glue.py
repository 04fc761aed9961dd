"""The GLUE+ runner on a tiny model: real steps, real failures, nothing invented, nothing lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from trimtab.bench import glue_cell as cell_module
from trimtab.bench import methods as methods_module
from trimtab.bench import sources
from trimtab.bench.evaluate import Layout, evaluate, evaluate_rows, free_answers
from trimtab.bench.glue import Outcome, run_glue
from trimtab.bench.glue_cell import GlueRequest
from trimtab.bench.methods import METHODS, Tuning, batches, method, tuner
from trimtab.cli import app
from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.data.tasks import TASKS
from trimtab.data.tasks.load import load_task
from trimtab.errors import RequestError
from trimtab.models import load_model, load_tokenizer
from trimtab.models.adapters import add_lora
from trimtab.monitor.progress import make_progress
from trimtab.placement import PlacementPlan
from trimtab.recipes.scored_eval import evaluate as judge_all

CPU = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def run(model: Path, out: Path, **more: Any) -> Outcome:
    said = more.pop("said", [])
    settings = {
        "tasks": ("sst2",),
        "methods": ("zero-shot",),
        "data": "sample",
        "steps": 2,
        "eval_rows": 8,
        "max_length": 256,
    }
    request = GlueRequest(model=str(model), device="cpu", **{**settings, **more})
    return run_glue(request, out, said.append, make_progress("none"))


@pytest.fixture
def loaded(tiny_model: Path) -> tuple[Any, Any]:
    settings = ModelSettings(name=str(tiny_model))
    return load_model(settings, CPU), load_tokenizer(settings)


def test_every_method_tunes_and_says_what_it_did(tiny_model: Path, tmp_path: Path) -> None:
    outcome = run(tiny_model, tmp_path / "o", methods=("all",), eval_every=2)
    assert not outcome.failed
    cells = {m: c for (_, m, _), c in outcome.results.cells.items()}
    assert set(cells) == set(METHODS)
    work = {m: (c["forwards"], c["backwards"]) for m, c in cells.items()}
    # DiZO projects once, at the end of so short a run: 20 passes.
    assert work == {
        "zero-shot": (0, 0),
        "full": (2, 2),
        "lora": (2, 2),
        "mezo": (4, 0),
        "mezo-lora": (4, 0),
        "dizo": (24, 0),
        "dizo-lora": (24, 0),
        "fzoo": (18, 0),
        "fzoo-lora": (18, 0),
    }
    for name, cell in cells.items():
        assert 0 <= cell["metrics"]["accuracy"] <= 1
        assert cell["score"] == cell["metrics"]["accuracy"]
        assert len(cell["curve"]) == (name != "zero-shot")
    # q and v of two layers; of an adapter both halves.
    assert cells["dizo"]["facts"]["projected_tensors"] == 4
    assert cells["dizo-lora"]["facts"]["projected_tensors"] == 8
    assert cells["dizo"]["facts"]["projection_rounds"] == 1
    assert cells["mezo"]["settings"]["learning_rate"] == 1e-6
    assert cells["dizo-lora"]["settings"]["eps"] == 1e-2


def test_every_task_is_measured_by_its_official_metrics(tiny_model: Path, tmp_path: Path) -> None:
    outcome = run(tiny_model, tmp_path / "o", tasks=("all",), eval_rows=3)
    assert not outcome.failed
    for (name, _, _), cell in outcome.results.cells.items():
        expected = set(TASKS[name].metrics)
        if name == "mnli":
            expected |= {"accuracy_mismatched"}
        assert set(cell["metrics"]) == expected
        assert cell["score"] == pytest.approx(sum(cell["metrics"].values()) / len(expected))
    text = outcome.results.markdown()
    assert "accuracy (mismatched)" in text
    assert "smoke test, not a benchmark" in text


def test_a_broken_task_and_a_broken_method_are_failures_and_the_others_go_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    for name in ("sst2", "cola"):
        (data / name).mkdir(parents=True)
        rows = [{"sentence": f"row {n}", "label": n % 2} for n in range(4)]
        if name == "cola":
            rows[2]["label"] = -1
        for split in ("train", "validation"):
            (data / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def broken(self: Any) -> float:
        raise RuntimeError("the step blew up")

    monkeypatch.setattr(methods_module.FirstOrder, "step", broken)
    said: list[str] = []
    outcome = run(
        tiny_model,
        tmp_path / "o",
        tasks=("cola", "rte", "sst2"),
        methods=("zero-shot", "lora", "mezo"),
        data=str(data),
        said=said,
    )
    assert outcome.failed
    status = {(t, m): c["status"] for (t, m, _), c in outcome.results.cells.items()}
    assert {key for key, value in status.items() if value == "finished"} == {
        ("sst2", "zero-shot"),
        ("sst2", "mezo"),
    }
    assert len(status) == 9
    whole = json.loads((tmp_path / "o" / "results.json").read_text())
    for summary in whole["summary"]:
        if status[summary["task"], summary["method"]] == "failed":
            assert summary["score"]["mean"] is None
            assert summary["metrics"] == {}
    reasons = {(c["task"], c["method"]): c["reason"] for c in whole["cells"] if c["status"] == "failed"}
    assert "cola/train.jsonl, line 3: label -1" in reasons["cola", "lora"]
    assert "no folder rte" in reasons["rte", "mezo"]
    assert reasons["sst2", "lora"] == "RuntimeError: the step blew up"
    text = (tmp_path / "o" / "results.md").read_text()
    assert "- sst2, lora, seed 0: RuntimeError: the step blew up" in text
    assert sum("FAILED" in line for line in said) == 7


def test_scores_that_are_not_finite_are_a_failure(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(*args: Any) -> Any:
        model = load_model(*args)
        with torch.no_grad():
            next(iter(model.parameters())).fill_(torch.nan)
        return model

    monkeypatch.setattr(cell_module, "load_model", poisoned)
    outcome = run(tiny_model, tmp_path / "o", methods=("zero-shot", "mezo", "full"))
    assert [c["status"] for c in outcome.results.cells.values()] == ["failed"] * 3
    assert all("finite" in c["reason"] or "nan" in c["reason"] for c in outcome.results.failures())


def test_a_second_run_skips_what_is_finished_and_repairs_what_failed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cell_module.load_model
    calls = 0

    def second_load_fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("the disk went away")
        return real(*args)

    monkeypatch.setattr(cell_module, "load_model", second_load_fails)
    first = run(tiny_model, tmp_path / "o", methods=("zero-shot", "mezo-lora"))
    assert [c["reason"] for c in first.results.failures()] == ["OSError: the disk went away"]
    said: list[str] = []
    second = run(tiny_model, tmp_path / "o", methods=("zero-shot", "mezo-lora"), said=said)
    assert not second.failed
    assert calls == 3
    assert "sst2, zero-shot, seed 0: there already, kept" in said
    with pytest.raises(RequestError, match=r"steps 2 \(now 3\)"):
        run(tiny_model, tmp_path / "o", tasks=("cola", "sst2"), methods=("mezo-lora",), steps=3)
    assert calls == 3  # told before CoLA's cell was run


def test_a_finished_cell_outlives_its_rows(tiny_model: Path, tmp_path: Path) -> None:
    home = tmp_path / "data" / "sst2"
    home.mkdir(parents=True)
    for split in ("train", "validation"):
        (home / f"{split}.jsonl").write_text('{"sentence": "fine", "label": 1}\n', encoding="utf-8")
    asked: dict[str, Any] = {"data": str(tmp_path / "data")}
    first = run(tiny_model, tmp_path / "o", **asked)
    kept = (tmp_path / "o" / "cells" / "sst2--zero-shot--0.json").read_text()
    (home / "train.jsonl").unlink()
    said: list[str] = []
    again = run(tiny_model, tmp_path / "o", methods=("zero-shot", "mezo"), said=said, **asked)
    assert again.failed  # nobody can tell whether the rows are the same
    assert "sst2, zero-shot, seed 0: there already, kept, but not checked" in said[0]
    assert "no train file" in said[0]
    assert (tmp_path / "o" / "cells" / "sst2--zero-shot--0.json").read_text() == kept
    assert again.results.summary("sst2", "zero-shot") == first.results.summary("sst2", "zero-shot")
    assert [c["method"] for c in again.results.failures()] == ["mezo"]


def test_dizo_that_would_never_project_is_not_passed_off_as_dizo(tiny_model: Path, tmp_path: Path) -> None:
    outcome = run(tiny_model, tmp_path / "o", methods=("mezo", "dizo"), steps=2, interval=3)
    assert [c["method"] for c in outcome.results.failures()] == ["dizo"]
    assert "--interval 3: the run has 2 steps" in outcome.results.failures()[0]["reason"]


def test_prompts_that_lose_their_left_end_for_a_free_answer_are_counted(
    tiny_model: Path, tmp_path: Path, loaded: tuple[Any, Any]
) -> None:
    one = TASKS["squad"]
    questions = [one.question(r) for r in load_task(one, "sample", eval_rows=8).splits["validation"]]
    layout = Layout(loaded[1], 8, 512)
    longest = max(len(layout.encode(q).prompt) for q in questions)
    # Room for the prompt and its own answer, but not for as long an answer as the model may write.
    outcome = run(tiny_model, tmp_path / "o", tasks=("squad",), max_length=longest + 20)
    assert outcome.results.cells["squad", "zero-shot", 0]["truncated"] >= 1


def test_peak_memory_leaves_out_what_earlier_cells_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PlacementPlan(
        device="cuda:0", precision="bf16", scaler=False, weight_precision="bf16", strategy="single"
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    peak = cell_module._Peak(plan)
    peak.take()
    assert peak.bytes == 250
    assert cell_module._Peak(CPU).bytes is None


def test_an_interruption_keeps_what_is_done(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(methods_module.ZerothTuner, "step", interrupted)
        outcome = run(tiny_model, tmp_path / "o", methods=("zero-shot", "mezo", "dizo"))
    assert outcome.interrupted
    assert outcome.failed
    assert [(m, c["status"]) for (_, m, _), c in outcome.results.cells.items()] == [("zero-shot", "finished")]
    assert len(json.loads((tmp_path / "o" / "results.json").read_text())["cells"]) == 1
    assert "> not whole: the benchmark was interrupted" in (tmp_path / "o" / "results.md").read_text()
    assert not run(tiny_model, tmp_path / "o", methods=("zero-shot", "mezo")).failed
    assert "not whole" not in (tmp_path / "o" / "results.md").read_text()


def test_seeds_draw_other_rows_and_zero_shot_runs_once(tiny_model: Path, tmp_path: Path) -> None:
    outcome = run(tiny_model, tmp_path / "o", methods=("zero-shot", "lora"), seeds=(3, 4))
    keys = sorted((m, seed) for _, m, seed in outcome.results.cells)
    assert keys == [("lora", 3), ("lora", 4), ("zero-shot", 3)]
    summary = outcome.results.summary("sst2", "lora")
    assert summary["seeds"] == [3, 4]
    assert summary["score"]["std"] is not None
    losses = [outcome.results.cells["sst2", "lora", s]["curve"][-1]["loss"] for s in (3, 4)]
    assert losses[0] != losses[1]


def test_the_same_seed_gives_the_same_figures(tiny_model: Path, tmp_path: Path) -> None:
    curves = [
        [
            {k: v for k, v in point.items() if k != "seconds"}
            for c in run(tiny_model, tmp_path / name, methods=("lora", "dizo-lora")).results.cells.values()
            for point in c["curve"]
        ]
        for name in ("a", "b")
    ]
    assert curves[0] == curves[1]


def test_first_order_tuning_learns(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    one = TASKS["sst2"]
    questions = [one.question(r) for r in load_task(one, "sample").splits["train"]][:8]
    layout = Layout(tokenizer, 8, 256)
    tuning = Tuning(steps=30, batch_size=8, learning_rate=5e-3, eps=None, seed=0)
    engine = tuner(model, METHODS["full"], batches(one, questions, layout, tuning), tuning, CPU)
    losses = [engine.step() for _ in range(30)]
    assert losses[-1] < 0.2 < losses[0]
    assert evaluate(model, one, {"validation": questions}, layout) == {"accuracy": 1.0}


def test_answers_are_trained_by_their_own_tokens_alone(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    tuning = Tuning(steps=1, batch_size=4, learning_rate=0.0, eps=None, seed=0)
    for name, count in (("copa", 1), ("squad", 1), ("record", 1), ("cb", 3)):
        one = TASKS[name]
        questions = [one.question(r) for r in load_task(one, "sample").splits["train"]]
        (batch,) = batches(one, questions, Layout(tokenizer, 4, 512), tuning)()
        assert batch.length.shape == (4, count)


def test_batch_size_and_padding_change_no_score(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    one = TASKS["copa"]
    questions = [one.question(r) for r in load_task(one, "sample").splits["train"]]
    layouts = [Layout(tokenizer, size, 256) for size in (1, 16)]
    single, stacked = (
        judge_all(model, [x.encode(q) for q in questions], x.collate, x.batch_size, by_rows=True)
        for x in layouts
    )
    assert [j.choice for j in single] == [j.choice for j in stacked]
    assert [j.loss for j in single] == pytest.approx([j.loss for j in stacked], abs=1e-5)
    assert [j.expected for j in single] == pytest.approx([j.expected for j in stacked], abs=1e-5)


def test_free_answers_end_with_the_line_whatever_the_batch(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    one = TASKS["squad"]
    questions = [one.question(r) for r in load_task(one, "sample").splits["train"]][:3]
    answers = [free_answers(model, questions, Layout(tokenizer, size, 400)) for size in (1, 3)]
    assert answers[0] == answers[1]
    assert all("\n" not in a for a in answers[0])
    greedy = tokenizer(questions[0].prompt, return_tensors="pt")
    with torch.no_grad():
        first = int(model(**greedy).logits[0, -1].argmax())
    assert answers[0][0].startswith(tokenizer.decode([first]).strip())


def test_evaluation_leaves_the_mode_and_the_weights(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    model.train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    rows = load_task(TASKS["rte"], "sample").splits["validation"]
    evaluate_rows(model, tokenizer, TASKS["rte"], rows, device="cpu")
    assert model.training
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_lora_tunes_the_adapter_alone(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    adapted: Any = add_lora(model, LoraSettings(r=2, alpha=4, targets="attention"))
    before = {n: p.clone() for n, p in adapted.named_parameters()}
    one = TASKS["cola"]
    questions = [one.question(r) for r in load_task(one, "sample").splits["train"]][:4]
    tuning = Tuning(steps=2, batch_size=4, learning_rate=1e-2, eps=1e-2, seed=0, interval=1)
    stream = batches(one, questions, Layout(tokenizer, 4, 256), tuning)
    engine = tuner(adapted, METHODS["dizo-lora"], stream, tuning, CPU)
    engine.step()
    moved = {n for n, p in adapted.named_parameters() if not torch.equal(before[n], p)}
    assert moved
    assert all("lora_" in name for name in moved)


def test_unknown_names_are_refused_before_anything_runs(tiny_model: Path, tmp_path: Path) -> None:
    for more, said in [
        ({"tasks": ("sst3",)}, "did you mean sst2"),
        ({"methods": ("dzio",)}, "did you mean dizo"),
        ({"data": str(tmp_path / "none")}, "no such folder"),
        ({"tasks": ()}, "--datasets: an empty list"),
        ({"methods": ()}, "--methods: an empty list"),
    ]:
        with pytest.raises(RequestError, match=said):
            run(tiny_model, tmp_path / "o", **more)
    assert not (tmp_path / "o").exists()
    assert method("Mezo_LoRA").name == "mezo-lora"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No hub, and nothing downloaded before."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(sources, "in_model_cache", lambda name: False)
    sources.hub_reachable.cache_clear()
    yield
    sources.hub_reachable.cache_clear()


def test_a_scale_out_of_reach_gives_way_to_the_built_in_model_and_says_so(offline: None) -> None:
    choice = sources.choose_model(None, "large")
    assert choice.name == "smollm2"
    assert "Qwen/Qwen3-4B" in choice.note
    assert choice.shown.endswith("in place of Qwen/Qwen3-4B")
    assert sources.choose_model("owner/name", None).note == ""
    with pytest.raises(RequestError, match="small, medium, large, xlarge"):
        sources.choose_model(None, "huge")
    with pytest.raises(RequestError, match="each names a model"):
        sources.choose_model("owner/name", "small")


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_the_command_line_offline_names_what_really_ran(
    offline: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    # The tiny model stands where the built-in one would be loaded from; all else is the real command.
    from trimtab.models import builtin

    monkeypatch.setattr(builtin, "builtin_folder", lambda: tiny_model)
    arguments = "bench glue --device cpu --scale small --datasets sst2,cola --epochs 1 --methods zero-shot"
    result = CliRunner().invoke(app, [*arguments.split(), "--out", str(tmp_path / "o"), *extra])
    assert result.exit_code == 0, result.output
    whole = json.loads((tmp_path / "o" / "results.json").read_text())
    assert whole["run"]["model"] == "smollm2"
    assert whole["run"]["model_asked"] == "Qwen/Qwen3-0.6B"
    assert whole["run"]["data"]["cola"]["origin"] == "sample"
    assert "in place of Qwen/Qwen3-0.6B" in result.stdout
    if extra:
        assert json.loads(result.stdout) == whole
    else:
        assert result.stdout.count("a smoke test, not a benchmark") >= 3


def test_a_failed_task_ends_the_command_with_1(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "sst2").mkdir(parents=True)
    arguments = ["bench", "glue", "--model", str(tiny_model), "--methods", "zero-shot", "--datasets", "sst2"]
    arguments += ["--device", "cpu", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "no train file" in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epochs", "inf"], "--epochs inf"),
        (["--epochs", "0"], "nothing would be tuned"),
        (["--lr", "inf"], "--lr inf"),
        (["--eps", "nan"], "--eps nan"),
        (["--eps", "inf"], "--eps inf"),
        (["--eps", "0"], "give more than 0"),
        (["--seeds", "²"], "--seeds ²"),
        (["--seeds", "99999999999999999999"], "of 64 bits"),
        (["--seeds", "-1"], "--seeds -1"),
    ],
)
def test_numbers_that_cannot_be_used_are_refused(tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "glue", "--out", str(tmp_path / "o"), *options])
    assert isinstance(done.exception, RequestError)
    assert said in str(done.exception)
    assert not (tmp_path / "o").exists()


def test_help_names_every_task_and_method() -> None:
    # Laid out for a terminal, a word may stand at the end of a line.
    wide = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
    said = CliRunner().invoke(app, ["bench", "glue", "--help"], env=wide).output
    words = set(re.findall(r"[a-z0-9]+(?:-[a-z]+)?", said))
    assert {*TASKS, *METHODS} <= words


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for name in ("./no-such-folder", "owner/no-such-model"):
        with pytest.raises(RequestError, match=r"model\.name="):
            run_glue(GlueRequest(model=name, device="cpu"), tmp_path / "o", print, make_progress("none"))


def test_the_page_in_docs_shows_every_task_and_method_as_it_is(repository: Path) -> None:
    page = (repository / "docs" / "glue.md").read_text(encoding="utf-8")
    for one in TASKS.values():
        prompt, answers = one.template.replace("because | so", "because/so").rsplit(" -> ", 1)
        assert f"| `{one.name}` | `{prompt.strip()}` → {answers} |" in page
    for how in METHODS.values():
        rate = f"{how.learning_rate:g}" if how.learning_rate else "–"
        assert f"| {rate} | {f'{how.eps:g}' if how.eps else '–'} |" in next(
            line for line in page.splitlines() if line.startswith(f"| `{how.name}` |")
        )


def test_help_does_not_load_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom trimtab.cli import app\n"
        "r = CliRunner().invoke(app, ['bench', 'glue', '--help'])\n"
        "assert r.exit_code == 0 and '--datasets' in r.output, r.output\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
