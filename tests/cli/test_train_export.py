"""`train` that ends in an exported model, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import TrainerCallback

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def words(tiny_model: Path, tmp_path: Path) -> list[str]:
    """A run of two steps on a tiny model."""
    rows = [{"prompt": f"what is {n}", "completion": f"the answer {n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": tiny_model, "data": tmp_path / "rows.jsonl", "output_dir": tmp_path / "run"}
    short = ["training.max_steps=2", "training.batch_size=2", "data.eval_fraction=0", "device=cpu"]
    return ["recipe=sft", *(f"{key}={value}" for key, value in settings.items()), *short]


@pytest.mark.parametrize(
    ("method", "asked", "file"),
    [
        ("lora", ["--export", "ollama"], "ollama/Modelfile"),
        ("full", ["export={to: gguf, dtype: q8_0}"], "gguf/model-q8_0.gguf"),
        ("lora", ["export.to=merged"], "merged/model.safetensors"),
    ],
)
def test_train_ends_in_the_exported_model(
    trimtab: Trimtab, words: list[str], tmp_path: Path, method: str, asked: list[str], file: str
) -> None:
    done = trimtab("train", *words, f"method={method}", *asked, PATH="")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "export" / file).is_file()
    assert str(tmp_path / "run" / "export" / file) in done.stdout
    assert "next: trimtab export" not in done.stdout


def test_an_export_that_fails_leaves_the_run_and_says_how_to_go_on(
    trimtab: Trimtab, words: list[str], tmp_path: Path
) -> None:
    broken = tmp_path / "bin" / "ollama"
    broken.parent.mkdir()
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no server')\n")
    broken.chmod(0o755)
    done = trimtab("train", *words, "--export", "ollama", "--export.name", "tuned", PATH=str(broken.parent))
    assert done.returncode == 1
    assert f"the run is finished and kept in {tmp_path / 'run'}, but its export failed" in done.stderr
    assert "no server" in done.stderr
    assert f"trimtab export {tmp_path / 'run'} --to ollama --name tuned" in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_run_that_was_stopped_exports_nothing(
    trimtab: Trimtab, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: TrainerCallback, args: object, state: object, control: object, **_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("trimtab.placement.PlacementGuard.on_optimizer_step", stop, raising=False)
    done = trimtab("train", *words, "training.save_steps=1", "--export", "gguf")
    assert done.returncode == 1
    assert "stopped at step 1 of 2" in done.stdout
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.parametrize("verb", ["train", "plan"])
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["training.optimizer=adamm"], "did you mean adamw_torch?"),
        (["--optim", "galore_adamw"], "must be told which layers"),
        (["--report_to", "nowhere"], "Trimtab does not know this tracker"),
        (["--lr_scheduler", "cosin"], "did you mean cosine?"),
        (["export=olama"], "did you mean ollama?"),
        (["export.to=merged", "export.dtype=q8_0"], "quantised formats belong to GGUF files"),
        (["--export", "ollama", "--export.name", "has space"], "not a name that Ollama takes"),
    ],
)
def test_refused_before_anything_is_loaded(
    trimtab: Trimtab, words: list[str], tmp_path: Path, verb: str, asked: list[str], told: str
) -> None:
    done = trimtab(verb, *words, *asked)
    assert done.returncode == 2
    assert told in done.stderr
    assert not (tmp_path / "run").exists()


def test_broken_rank_variables_are_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom trimtab.cli.arguments import request_from\nfrom trimtab.errors import RequestError\n"
        "for name in ('adamm', 'adamw_torch'):\n"
        "    try:\n        request_from(['--optim', name])\n"
        "    except RequestError as error:\n        print(error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    ranks = {"TRIMTAB_LAUNCHER": "env", "RANK": "5", "WORLD_SIZE": "2"}
    for extra, told in (({}, 'training.optimizer = "adamm"'), (ranks, "RANK=5 with WORLD_SIZE=2")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | extra, check=False
        )
        assert done.returncode == 0, done.stderr
        assert told in done.stdout


def test_a_model_that_no_gguf_can_hold_is_refused_at_once(trimtab: Trimtab, tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    done = trimtab("train", f"model={tmp_path / 'gpt2'}", f"output_dir={tmp_path / 'run'}", "export=gguf")
    assert done.returncode == 2
    assert "GGUF export does not know this architecture" in done.stderr
    assert not (tmp_path / "run").exists()


def test_optimizers_are_those_that_transformers_has() -> None:
    from transformers.training_args import OptimizerNames

    from trimtab.recipes.requirements import _out_of_reach, optimizer_names

    names = optimizer_names()
    assert set(names) == {one.value for one in OptimizerNames}
    for name in ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"):
        assert _out_of_reach(name) is None
    told = {_out_of_reach(name) for name in names if "bit" in name and "galore" not in name}
    packages = ("bitsandbytes", "torchao")
    assert told <= {None, *(f"its package is not installed (`pip install {name}`)" for name in packages)}
