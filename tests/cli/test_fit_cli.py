"""`trimtab plan --gpus` and `trimtab fit` as a user meets them, with a model of which only the config is there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.cli.fit import _answer, more_by_itself
from trimtab.config import load_request
from trimtab.hardware.catalogue import Card

pytestmark = pytest.mark.usefixtures("warm_trials_server")
Trimtab = Callable[..., subprocess.CompletedProcess[str]]
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say it.", "completion": "It."}\n' * 8)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {folder}\n"
        f"data: {{source: {tmp_path / 'rows.jsonl'}, max_length: 512}}\n"
        "training: {batch_size: 4, max_steps: 2}\n"
        "speed: {compile: false, kernels: plain}\n"
        f"output_dir: {tmp_path / 'run'}\n"
    )
    return str(file)


def test_a_plan_for_gpus_that_are_not_here_says_what_was_executed(trimtab: Trimtab, config: str) -> None:
    done = trimtab("plan", config, "--gpus", "2xH200", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["strategy"] == "data_parallel"
    assert plan["reasons"]["memory"].startswith("executed on virtual GPUs: 2 steps, 4 rows of 512 tokens")
    for share in plan["memory"].values():
        assert share["executed"]
        assert share["weights"] < share["allocated"] < share["needed"]
    # All that the text says: the GPUs with their true size, the rows of a step, the parts and where they lie.
    assert [(gpu["name"], gpu["model"]) for gpu in plan["gpus"]] == [
        ("cuda:0", "NVIDIA H200"),
        ("cuda:1", "NVIDIA H200"),
    ]
    assert plan["batch"] == {"per_device": 4, "processes": 2, "accumulation": 1, "rows": 8}
    assert sum(part["parameters"] for part in plan["model"]["parts"]) == plan["model"]["parameters"]
    assert plan["model"]["layers"] == 2
    assert plan["config"] == config
    told = trimtab("plan", config, "--gpus=H200").stdout
    assert "allocated at the peak (weights" in told
    assert "executed on virtual GPUs" in told


def test_a_plan_for_the_processor_says_that_it_is_estimated(trimtab: Trimtab, config: str) -> None:
    done = trimtab("plan", config, "device=cpu")
    assert done.returncode == 0, done.stderr
    assert "(estimate)" in done.stdout
    assert "estimated by formula: only what CUDA GPUs hold is executed" in done.stdout


def test_fit_writes_a_config_that_plan_takes(trimtab: Trimtab, config: str, tmp_path: Path) -> None:
    out = tmp_path / "fitted.yaml"
    words = ("--gpu", "RTX-3060", "training.batch_size=8", "--out", str(out), "--json")
    done = trimtab("fit", config, *words)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert (best["gpu"], best["strategy"], best["micro_batch"]) == ("RTX-3060", "single", 8)
    planned = json.loads(trimtab("plan", str(out), "--gpus", "RTX-3060", "--json").stdout)
    assert planned["strategy"] == "single"
    # What the search executed is the plan's figure, to the byte, and needs not be executed again.
    told = planned["memory"]["cuda:0"]
    assert (told["allocated"], told["needed"]) == (best["peak_bytes"], best["needed_bytes"])
    assert "; kept from " in planned["reasons"]["memory"]
    fresh = json.loads(trimtab("plan", str(out), "--gpus", "RTX-3060", "--json", "--fresh").stdout)
    assert fresh["memory"] == planned["memory"]
    own = Path(config).read_text()
    written = out.read_text()
    kept = own.replace("training: {batch_size: 4,", "training: {batch_size: 8,").splitlines()
    assert [line for line in written.splitlines() if line[:1] != "#"] == [*kept, "processes: 1"]
    again = trimtab("fit", config, "--gpu", "RTX-3060", "--out", str(out))
    assert again.returncode == 2
    assert "the file is there" in again.stderr
    assert out.read_text() == written
    onto_itself = trimtab("fit", config, "--gpu", "RTX-3060", "--out", config, "--overwrite")
    assert onto_itself.returncode == 2
    assert "your own config" in onto_itself.stderr
    assert Path(config).read_text() == own


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_a_place_that_may_not_be_written_is_refused_before_the_search(
    trimtab: Trimtab, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    # As root may write everywhere, the system's answer for anyone else is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    done = trimtab("fit", config, "--gpu", "H200", option, str(tmp_path / "new"))
    assert done.returncode == 2
    assert "it may not be written" in done.stderr
    assert not (tmp_path / "new").exists()


def test_fit_makes_its_page(trimtab: Trimtab, config: str, tmp_path: Path) -> None:
    page = tmp_path / "fit.html"
    done = trimtab("fit", config, "--gpus", "2xH200", "--html", str(page), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {option["gpus"] for option in told["options"]} == {2}
    assert "Fit of" in page.read_text()
    page.write_text("my own notes")
    refused = trimtab("fit", config, "--gpu", "H200", "--html", str(page))
    assert refused.returncode == 2
    assert "no page of Trimtab" in refused.stderr
    assert page.read_text() == "my own notes"


def test_a_search_that_is_stopped_tells_what_it_found(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from trimtab.cli import app
    from trimtab.recipes.fitting import Search

    real = Search.on

    def stopped_at_the_second(search: Search, card: Card, *args: Any, **kwargs: Any) -> None:
        if search.found.options:
            raise KeyboardInterrupt
        real(search, card, *args, **kwargs)

    monkeypatch.setattr(Search, "on", stopped_at_the_second)
    out = tmp_path / "fitted.yaml"
    words = ["fit", config, "--gpu", "H200", "--gpu", "T4", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "stopped before the search was over" in done.output
    assert "best: 1 × H200" in done.output
    assert "times are an estimate" in done.output
    assert out.is_file()


def test_fit_tells_machines_all_that_it_executed(trimtab: Trimtab, config: str) -> None:
    words = ("--gpu", "H100", "--gpu", "h200", "--gpus", "2", "--tokens-per-step", "8192", "--json")
    done = trimtab("fit", config, *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["rows_a_step"] == 16
    assert {option["gpu"] for option in told["options"]} == {"H100", "H200"}
    best = told["best"]
    assert best["fits"]
    assert best["gpus"] == 2
    assert best["rows_a_step"] == 16
    assert best["needed_bytes"] == best["reserved_bytes"] + best["context_bytes"]
    assert "sharding: false" in told["config"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "without --gpu"),
        (("--gpu", "H2000"), "not known here"),
        (("--gpu", "H200,H2000"), "'H2000': not known here"),
        (("--gpu", "MPS-5GB"), "not a size"),
        (("--gpu", "H200", "--gpus", "0"), "there may be 1 to"),
        (("--gpu", "H200", "--tokens-per-step", "5"), "less than one row"),
        (("--gpu", "0xH200"), "there may be 1 to"),
        (("--gpu", "2xH200", "--gpus", "4"), "two numbers of GPUs"),
        (("--gpu", "2xH200", "--max-gpus", "4"), "up to so many"),
        (("--gpu", "2xMPS-64GB"), "one in its machine"),
        (("--gpu", "H200", "--html", "/no/such/folder/x.html"), "there is no folder"),
        (("--gpu", "H200", "--out", "/no/such/folder/x.yaml"), "there is no folder"),
    ],
)
def test_a_wrong_request_ends_with_two(
    trimtab: Trimtab, config: str, words: tuple[str, ...], said: str
) -> None:
    done = trimtab("fit", config, *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_rows_that_a_config_says_of_one_process_are_called_so() -> None:
    several: Any = SimpleNamespace(options=[SimpleNamespace(way=SimpleNamespace(ranks=2))])
    config = load_request(None, ["data.source=rows.jsonl", "training.batch_size=4"]).config
    assert "4 rows a step are those of one process" in (more_by_itself(config, None, several) or "")
    assert more_by_itself(config, 4096, several) is None
    whole = load_request(None, ["data.source=rows.jsonl", "processes=2"]).config
    assert more_by_itself(whole, None, several) is None


def test_where_no_layout_was_executed_the_answer_says_what_to_try() -> None:
    config = load_request(None, ["data.source=rows.jsonl"]).config
    said = _answer(None, config, [], stopped=False)
    assert "for the reasons above" in said
    assert "more or larger GPUs" in said
