"""The zeroth-order recipe end to end on a tiny model: what is kept, and the classes of runs that must agree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimtab.config import load_config
from trimtab.errors import RequestError
from trimtab.recipes.planning import plan_run
from trimtab.recipes.replay import replay_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty sentences of different lengths, half of each label."""
    path = tmp_path_factory.mktemp("scored") / "rows.jsonl"
    lines = [
        {
            "sentence": f"the film number {n} " + "is long " * (n % 5) + ("good" if n % 2 else "bad"),
            "label": n % 2,
        }
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.fixture
def settings(tiny_model: Path, rows: Path, tmp_path: Path) -> list[str]:
    return [
        "recipe=zeroth_order",
        f"model={tiny_model}",
        f"data={rows}",
        "zeroth.template={sentence}; it was",
        'zeroth.labels={0: " terrible", 1: " great"}',
        "zeroth.interval=2",
        "zeroth.projection_iterations=2",
        "device=cpu",
        f"output_dir={tmp_path / 'run'}",
        "training.max_steps=5",
        "training.batch_size=4",
        "training.learning_rate=0.001",
        "monitor.progress=none",
    ]


# A learning rate that ruins the model, so that its best step is an early one.
RUINOUS = ("training.learning_rate=3.0", "zeroth.interval=50", "seed=3")
LOSSES = (0.69, 0.68, 0.61, 0.72, 0.66, 0.75)


@pytest.fixture
def _best_at_step_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as they are, with held-out losses that are given: where real ones are lowest is up to the last bits."""
    from trimtab.recipes.zeroth_order import ZerothEngine

    def measure(self: ZerothEngine, heard: Any) -> dict[str, float]:
        return {"loss": LOSSES[self.optimizer.step_number], "accuracy": 0.5}

    monkeypatch.setattr(ZerothEngine, "measure", measure)


def tune(settings: list[str], *more: str) -> tuple[dict[str, Any], Path]:
    config = load_config(None, [*settings, *more])
    assert config.output_dir is not None
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), [].append)
    return summary, Path(config.output_dir)


def metrics(run: Path, phase: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == phase]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "adapter" if (run / "adapter").is_dir() else run / "model"
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same_weights(a: Path, b: Path) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_run_keeps_what_it_promises(settings: list[str]) -> None:
    summary, run = tune(settings, "training.eval_steps=2")
    assert summary["status"] == "finished"
    # Five steps of two passes, and two rounds of two iterations of two passes.
    assert summary["forwards"] == 5 * 2 + 2 * 2 * 2
    assert summary["projected_tensors"] == 8
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "adapter" / "tokenizer.json").is_file()
    assert json.loads((run / "plan.json").read_text())["device"] == "cpu"
    assert json.loads((run / "summary.json").read_text())["steps"] == 5
    assert [line["step"] for line in metrics(run, "eval")] == [0, 2, 4, 5]
    first = metrics(run)[0]
    assert {"loss", "projected_gradient", "forwards", "learning_rate"} <= first.keys()
    card = (run / "adapter" / "README.md").read_text()
    assert "zeroth-order steps (dizo)" in card
    assert f"{summary['metrics']['accuracy']['after']:.4f}" in card


def test_the_usual_values_are_kept_in_the_config(settings: list[str]) -> None:
    without = [s for s in settings if not s.startswith(("training.learning_rate", "training.batch_size"))]
    _, run = tune(without, "training.max_steps=1", "data.max_rows=8")
    kept = load_config(run / "config.yaml", [])
    assert (kept.training.learning_rate, kept.zeroth.eps) == (1e-4, 1e-2)
    assert (kept.training.lr_scheduler, kept.training.batch_size) == ("constant", 16)
    _, run = tune(without, "training.max_steps=1", "data.max_rows=8", "method=full", "overwrite=true")
    kept = load_config(run / "config.yaml", [])
    assert (kept.training.learning_rate, kept.zeroth.eps) == (1e-6, 1e-3)


@pytest.mark.parametrize(("method", "rate"), [("mezo", "1e-2"), ("fzoo", "5e-2")])
def test_the_loss_falls(settings: list[str], method: str, rate: str) -> None:
    summary, _ = tune(
        settings,
        f"zeroth.method={method}",
        f"training.learning_rate={rate}",
        "zeroth.queries=4",
        "lora.targets=attention",
        "training.max_steps=30",
        "training.batch_size=8",
        "training.eval_steps=10",
    )
    loss = summary["eval_loss"]
    assert loss["after"] < loss["before"] - 0.02


def test_the_same_seed_gives_the_same_bits(settings: list[str], tmp_path: Path) -> None:
    _, one = tune(settings, f"output_dir={tmp_path / 'a'}")
    _, two = tune(settings, f"output_dir={tmp_path / 'b'}")
    _, other = tune(settings, f"output_dir={tmp_path / 'c'}", "seed=1")
    assert same_weights(one, two)
    assert losses(one) == losses(two)
    assert losses(one) != losses(other)


def test_lanes_change_nothing(settings: list[str], tmp_path: Path) -> None:
    _, apart = tune(settings, f"output_dir={tmp_path / 'a'}", "zeroth.lanes=1", "zeroth.method=fzoo")
    _, stacked = tune(settings, f"output_dir={tmp_path / 'b'}", "zeroth.lanes=9", "zeroth.method=fzoo")
    assert losses(stacked) == pytest.approx(losses(apart), abs=1e-5)


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, settings: list[str]) -> Path:
    """The folder of a run that SIGINT stopped after so many steps."""
    from trimtab.zeroth import optimizer

    class Interrupted(optimizer.ZerothOrder):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            result = super().step(*args, **kwargs)
            if self.step_number == after:
                os.kill(os.getpid(), signal.SIGINT)
            return result

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "ZerothOrder", Interrupted)
        summary, run = tune(settings)
    assert (summary["status"], summary["steps"]) == ("interrupted", after)
    return run


@pytest.mark.parametrize("method", ["dizo", "fzoo"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    settings: list[str], tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by SIGINT after step 3 and resumed: the same weights, metrics and trajectory, bit for bit."""
    ours = [*settings, f"zeroth.method={method}", "training.eval_steps=4", "training.keep_best=false"]
    _, whole = tune(ours, f"output_dir={tmp_path / 'whole'}")
    broken = [*ours, f"output_dir={tmp_path / 'broken'}"]
    run = interrupted(monkeypatch, 3, broken)
    assert not (run / "adapter").exists()
    # What a crash leaves after the checkpoint is not part of the run.
    with (run / "trajectory.bin").open("ab") as file:
        file.write(b"\x00" * 7)
    resumed, run = tune(broken, "training.resume=true")
    assert resumed["status"] == "finished"
    assert same_weights(whole, run)
    assert losses(run) == losses(whole)
    assert metrics(run, "eval")[-1]["eval_loss"] == metrics(whole, "eval")[-1]["eval_loss"]
    assert resumed["forwards"] == json.loads((whole / "summary.json").read_text())["forwards"]
    after_header = [(r / "trajectory.bin").read_bytes().partition(b"\n")[2] for r in (whole, run)]
    assert after_header[0] == after_header[1]


@pytest.mark.usefixtures("_best_at_step_2")
def test_a_run_stopped_at_its_best_step_keeps_that_step_when_resumed(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation that the stop left out is made up for."""
    ours = [*settings, *RUINOUS, "training.eval_steps=1"]
    expected, whole = tune(ours, f"output_dir={tmp_path / 'whole'}")
    broken = [*ours, f"output_dir={tmp_path / 'broken'}"]
    assert expected["kept_step"] < 5
    interrupted(monkeypatch, expected["kept_step"], broken)
    summary, run = tune(broken, "training.resume=true")
    assert (summary["kept_step"], summary["evaluations"]) == (expected["kept_step"], expected["evaluations"])
    assert same_weights(whole, run)


def test_a_finished_run_goes_on_where_its_schedule_has_no_end(settings: list[str], tmp_path: Path) -> None:
    ours = [*settings, "training.eval_steps=2", "training.keep_best=false"]
    _, whole = tune(ours, f"output_dir={tmp_path / 'whole'}")
    tune(ours, "training.max_steps=2")
    _, run = tune(ours, "training.resume=true")
    assert losses(run) == losses(whole)
    assert same_weights(whole, run)


def test_a_refused_resume_leaves_the_earlier_run_as_it_is(settings: list[str]) -> None:
    _, run = tune(settings, "training.max_steps=2", "training.lr_scheduler=linear")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(
        RequestError, match=r"max_steps +was 2, is now 5 .*\n +zeroth.eps +was 0.01, is now 0.5"
    ):
        tune(settings, "training.lr_scheduler=linear", "training.resume=true", "zeroth.eps=0.5")
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    "more",
    [
        ["zeroth.method=mezo", "method=full"],
        ["zeroth.method=dizo", "training.weight_decay=0.1", "training.lr_scheduler=cosine"],
        ["zeroth.method=fzoo", "zeroth.queries=3"],
    ],
)
def test_a_replay_gives_the_kept_weights(settings: list[str], more: list[str], tmp_path: Path) -> None:
    _, run = tune(settings, *more, "training.keep_best=false")
    result = replay_run(run, check=True, out=tmp_path / "again")
    assert result.differing == ()
    assert result.tensors == len(weights(run)) > 0
    assert (tmp_path / "again" / "tokenizer.json").is_file()
    # The file alone is enough, and fewer steps are other weights.
    alone = tmp_path / "alone.bin"
    alone.write_bytes((run / "trajectory.bin").read_bytes())
    replay_run(alone, out=tmp_path / "from-file")
    theirs = next((tmp_path / "from-file").glob("*.safetensors"))
    assert theirs.read_bytes() == (tmp_path / "again" / theirs.name).read_bytes()
    assert replay_run(run, check=True, steps=3).differing


@pytest.mark.usefixtures("_best_at_step_2")
@pytest.mark.parametrize("save_steps", [1, 3])
def test_the_best_weights_are_kept_and_replayed(settings: list[str], save_steps: int) -> None:
    """The kept step is the best of those that were saved, an early one, and the replay stops there."""
    summary, run = tune(settings, *RUINOUS, "training.eval_steps=1", f"training.save_steps={save_steps}")
    evals = {line["step"]: line["eval_loss"] for line in metrics(run, "eval") if line["step"]}
    saved = {step: loss for step, loss in evals.items() if step % save_steps == 0 or step == 5}
    assert summary["kept_step"] == min(saved, key=saved.__getitem__)
    assert summary["kept_step"] == (2 if save_steps == 1 else 3)
    assert summary["eval_loss"]["after"] == min(saved.values())
    assert replay_run(run, check=True).differing == ()


@pytest.mark.usefixtures("_best_at_step_2")
def test_old_checkpoints_go_and_the_best_stays(settings: list[str]) -> None:
    summary, run = tune(
        settings,
        "training.learning_rate=3.0",
        "training.eval_steps=1",
        "training.save_total_limit=1",
        "seed=3",
    )
    left = {folder.name for folder in (run / "checkpoints").iterdir()}
    assert summary["kept_step"] == 2
    assert left == {"checkpoint-5", "checkpoint-2"}


def test_nan_stops_the_run_before_its_step_is_made(
    settings: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    from trimtab.zeroth.optimizer import NotFinite

    broken = tmp_path / "broken-model"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotFinite):
        tune(settings, f"model={broken}", "data.eval_fraction=0")
    run = tmp_path / "run"
    assert metrics(run, "nonfinite")[0]["step"] == 1
    assert metrics(run) == []
    assert not (run / "adapter").exists()
    assert not (run / "checkpoints").exists()


def test_answers_are_learned_too(settings: list[str], tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    sums = [{"a": a, "b": b, "sum": a + b} for a in range(5) for b in range(4)]
    path.write_text("\n".join(map(json.dumps, sums)))
    kept = [s for s in settings if not s.startswith(("zeroth.template", "zeroth.labels", "data="))]
    summary, _ = tune(
        kept,
        f"data={path}",
        "zeroth.template={a} plus {b} is",
        'zeroth.answer=" {sum}"',
        "data.eval_fraction=0.2",
    )
    assert summary["eval_rows"] == 4
    assert summary["metrics"] == {}
    assert summary["eval_loss"]["before"] > 0


@pytest.mark.parametrize("task", ["sst2", "mrpc", "stsb", "copa", "multirc", "squad"])
def test_tasks_by_name_run_on_the_shipped_sample(settings: list[str], task: str) -> None:
    kept = [s for s in settings if not s.startswith(("zeroth.template", "zeroth.labels", "data="))]
    summary, _ = tune(kept, f"zeroth.task={task}", "data.max_rows=8", "training.max_steps=1")
    assert summary["status"] == "finished"
    wanted = {
        "sst2": {"accuracy"},
        "mrpc": {"accuracy", "f1"},
        "stsb": {"accuracy", "pearson", "spearman"},
        "copa": {"accuracy"},
        "multirc": {"accuracy", "f1a", "em"},
        "squad": set(),
    }
    assert set(summary["metrics"]) == wanted[task]


def test_an_answer_that_leaves_no_room_for_its_prompt_is_named(settings: list[str]) -> None:
    long = 'zeroth.labels={0: " terrible and long and dull", 1: " great"}'
    with pytest.raises(RequestError, match=r"line \d+: its longest answer has \d+ tokens[\s\S]*max_length=8"):
        tune(settings, long, "data.max_length=8")


def test_a_replay_needs_a_folder_that_it_can_write_to(settings: list[str], tmp_path: Path) -> None:
    _, run = tune(settings, "training.max_steps=1")
    (tmp_path / "file").write_text("mine")
    for place, why in (("file", "File exists"), ("file/inside", "Not a directory"), (".", "is not empty")):
        with pytest.raises(RequestError, match=rf"--out .*: .*{why}"):
            replay_run(run, out=tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_checkpoint_of_another_model_is_refused(settings: list[str]) -> None:
    _, run = tune(settings, "training.max_steps=2")
    with pytest.raises(RequestError, match=r"lora.r +was 16, is now 4"):
        tune(settings, "training.resume=true", "lora.r=4")
    for name in ("starts.json", "config.yaml"):  # nothing tells what it began with but the checkpoint itself
        (run / name).unlink()
    with pytest.raises(RequestError, match="not those of this model"):
        tune(settings, "training.resume=true", "lora.r=4")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_two_ranks_equal_one_bit_for_bit(settings: list[str], tmp_path: Path) -> None:
    """processes=2 starts torchrun by itself; with the same micro-batches every bit is that of one process."""
    common = ["training.batch_size=4", "training.eval_steps=3"]
    (tmp_path / "plain.yaml").write_text("recipe: zeroth_order\n")
    start = ["train", str(tmp_path / "plain.yaml"), *settings, *common]
    one = run_cli(*start, f"output_dir={tmp_path / 'one'}", "training.gradient_accumulation_steps=2")
    assert one.returncode == 0, one.stderr[-3000:]
    two = run_cli(*start, f"output_dir={tmp_path / 'two'}", "processes=2")
    assert two.returncode == 0, two.stderr[-3000:]
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    assert (plan["strategy"], plan["processes"], plan["launcher"]) == ("data_parallel", 2, "torchrun")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    evals = [[line["eval_accuracy"] for line in metrics(tmp_path / r, "eval")] for r in ("one", "two")]
    assert evals[0] == evals[1]
