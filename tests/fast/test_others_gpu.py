"""Vision, voice and GRPO on a real GPU: the fast ways give the plain ways' numbers, and steady steps do not wait."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from trimtab.hardware import probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe().gpus, reason="no CUDA device here")]
PLAIN = ("speed.adapters=plain", "speed.head=plain", "speed.compile=false", "speed.kernels=plain")


def test_token_logprobs_by_the_kernel_are_those_of_whole_logits() -> None:
    from trimtab.fast.logprobs import token_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(301, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5003, 256, device="cuda", dtype=torch.bfloat16) / 16
    tokens = torch.randint(0, 5003, (301,), device="cuda")
    weights = torch.randn(301, device="cuda")
    for shape in ({}, {"temperature": 0.7, "scale": 0.5}, {"softcap": 3.0, "temperature": 1.2}):
        logits = (hidden.float() @ weight.float().T) * shape.get("scale", 1.0)
        if cap := shape.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        every = (logits / shape.get("temperature", 1.0)).log_softmax(-1)
        wanted = every.gather(1, tokens[:, None])[:, 0]
        (slope,) = torch.autograd.grad((wanted * weights).sum(), hidden)
        ours, entropy = token_logprobs(hidden, weight, tokens, **shape)
        (found,) = torch.autograd.grad((ours * weights).sum(), hidden)
        torch.testing.assert_close(ours, wanted, rtol=0.02, atol=0.03)
        torch.testing.assert_close(entropy, -(every.exp() * every).sum(-1), rtol=0.02, atol=0.02)
        assert (found - slope).float().norm() < 0.02 * slope.float().norm()


class Waits(TrainerCallback):
    """Where the host waited for the device between the begin and the end of each step after the first few."""

    def __init__(self, after: int) -> None:
        self.after, self.found = after, list[str]()
        self._caught: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.after:
            self._caught = warnings.catch_warnings(record=True)
            self._seen = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self._caught = None
            # The first to switch this on in a process is also told that it is a prototype.
            self.found += [
                f"{w.filename}:{w.lineno}" for w in self._seen if "called a synchronizing" in str(w.message)
            ]


def run(
    folder: Path, words: list[str], watched: tuple[str, str] | None = None, patch: Any = None, after: int = 4
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """What a run logged, what it said, and where a steady step waited."""
    import importlib

    from trimtab.config import load_config
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.run import run_recipe
    from trimtab.recipes.run_folder import open_run_folder

    waits = Waits(after)
    if watched is not None:
        module = importlib.import_module(watched[0])
        kind = getattr(module, watched[1])

        class Watched(kind):  # type: ignore[misc,valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.add_callback(waits)

        patch.setattr(module, watched[1], Watched)
    said: list[str] = []
    config = load_config(None, [*words, f"output_dir={folder}", "device=cuda", "processes=1"])
    run_recipe(config, plan_run(config).plan, open_run_folder(config), said.append)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "train"], said, waits.found


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


VOICE = [
    *("recipe=voice", "method=lora", "lora.r=8", "lora.targets=[attention, text_mlp, audio_mlp, audio_head]"),
    *("training.max_steps=8", "training.batch_size=4", "training.learning_rate=0.0005"),
    *("training.keep_best=false", "data.eval_fraction=0", "monitor.progress=none", "voice.show=0"),
    # Whole batches: one of a single row is compiled when it comes.
    *("training.logging_steps=1", "precision=bf16", "data.max_rows=20"),
]
VISION = [
    *("recipe=vision", "method=lora", "training.max_steps=8", "training.batch_size=8", "lora.r=8"),
    *("training.learning_rate=0.001", "data.max_rows=80", "samples.held_out=0", "data.eval_fraction=0"),
    *("monitor.progress=none", "training.keep_best=false", "precision=bf16", "training.logging_steps=1"),
]


def test_a_steady_step_of_a_voice_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("soundfile")
    watched = ("trimtab.recipes.voice_trainer", "VoiceTrainer")
    rows, said, waits = run(tmp_path / "fast", VOICE, watched, monkeypatch)
    assert waits == [], "\n".join([*said, *waits])
    plain, _, _ = run(tmp_path / "plain", [*VOICE, *PLAIN])
    assert losses(rows) == pytest.approx(losses(plain), rel=0.02)


@pytest.mark.parametrize("objective", ["causal", "masked_diffusion"])
def test_vision_learns_the_same_and_waits_in_no_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    watched = ("trimtab.recipes.picture_trainer", "PictureTrainer")
    words = [*VISION, f"vision.objective={objective}"]
    rows, said, waits = run(tmp_path / "fast", words, watched, monkeypatch)
    if objective == "causal":  # masks are drawn on the CPU, of the batch's own tokens
        assert [place for place in waits if "/trimtab/" in place] == [], "\n".join([*said, *waits])
    assert not any("own logits" in line for line in said), said
    plain, _, _ = run(tmp_path / "plain", [*words, *PLAIN])
    assert losses(rows) == pytest.approx(losses(plain), rel=0.03)


def test_grpo_gives_the_same_losses_and_rewards(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) + "\n" for n in range(8)))
    words = [
        *("recipe=grpo", f"model={tiny_model}", f"data={data}", "reward=test_others_gpu:token_sum"),
        *("grpo.chat=false", "grpo.num_generations=4", "grpo.max_completion_length=8", "grpo.beta=0.1"),
        *("training.max_steps=3", "training.learning_rate=0.001", "monitor.progress=none", "precision=fp32"),
        *("method=lora", "lora.r=4", "training.logging_steps=1"),
    ]
    fast, said, _ = run(tmp_path / "fast", words)
    assert not any("TRL's own head" in line for line in said), said
    plain, _, _ = run(tmp_path / "plain", [*words, *PLAIN])
    for name in ("loss", "reward", "entropy", "kl"):
        assert [row[name] for row in fast] == pytest.approx([row[name] for row in plain], rel=0.02, abs=2e-3)


def token_sum(completion_ids: list[list[int]]) -> list[float]:
    """A reward that differs from one completion to the next."""
    return [float(sum(ids) % 5) for ids in completion_ids]
