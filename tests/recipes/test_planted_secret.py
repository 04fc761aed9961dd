"""A secret that is planted in the environment, in an address and in a raised error is in no file that a run writes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from trimtab.config import load_config
from trimtab.config.problems import ConfigError

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
SECRET = "Zq4/hushhush+Value&of no form"
PARTS = ("Zq4/", "hushhush", "of no form")

REWARD = """
import os

def tells(completions, trainer_state, **columns):
    secret = os.environ["JUDGE_TOKEN"]
    if trainer_state is not None and trainer_state.global_step >= 2:
        raise ValueError(f"401 for {secret} at https://judge/?auth={secret!r}", {"headers": secret})
    return [float(len(completion[0]["content"]) % 3) for completion in completions]
"""


def files_with_the_secret(folder: Path) -> list[str]:
    written = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert written
    secrets = [form.encode() for part in PARTS for form in (part, quote(part, safe=""))]
    return [str(path) for path in written if any(one in path.read_bytes() for one in secrets)]


def test_a_planted_secret_is_in_no_file_of_a_failed_run(
    trimtab: Trimtab, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"telling_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{quote(SECRET, safe='')}@127.0.0.1:9")
    done = trimtab(
        *(
            "train",
            "recipe=grpo",
            f"model={tiny_model}",
            "data.source=sums",
            "data.max_rows=16",
            "data.max_length=96",
        ),
        *(f"reward={name}:tells", "grpo.num_generations=4", "grpo.max_completion_length=6", "device=cpu"),
        *("training.max_steps=4", "training.batch_size=4", "training.save_steps=1", "monitor.progress=none"),
        f"output_dir={tmp_path / 'run'}",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "(not shown)" in (tmp_path / "run" / "summary.json").read_text()
    assert files_with_the_secret(tmp_path) == []
    assert not any(part in done.stdout + done.stderr for part in PARTS)
    told = trimtab("report", str(tmp_path / "run"), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert files_with_the_secret(tmp_path) == []


@pytest.mark.parametrize(
    "setting", ["model.name={}", "samples.prompts=[say {}]", "output_dir=runs/{}", "data={}"]
)
def test_a_config_with_the_value_of_a_secret_variable_is_refused(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "Zq4plantedValue77")
    with pytest.raises(ConfigError, match="holds the value of JUDGE_TOKEN") as caught:
        load_config(None, [setting.format("Zq4plantedValue77")])
    assert "planted" not in str(caught.value)
