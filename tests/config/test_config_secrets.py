"""No secret gets into a config, and so into nothing that is made from one; names that only look like keys do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.config import Config, dump_config, load_config
from trimtab.config.problems import ConfigError, has_key, has_login, without_secrets

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
SECRET = "Xy7hush/Hush+99"
HUB = "hf_" + "aB3dE" * 7
AWS = "AKIA" + "Q7ZT" * 4


@pytest.mark.parametrize(
    ("setting", "way"),
    [
        (f"data.endpoint_url=https://me:{SECRET}@host:9000", "AWS_SECRET_ACCESS_KEY"),
        (f"data.endpoint_url=https://{SECRET.replace('/', '')}@host", "AWS_SECRET_ACCESS_KEY"),
        (f"data.source=s3://me:{SECRET}@bucket/rows.jsonl", "AWS_SECRET_ACCESS_KEY"),
        (f"data=https://host/rows.jsonl?X-Amz-Signature={SECRET}", "AWS_SECRET_ACCESS_KEY"),
        (f"data.eval_source=https://host/rows.jsonl?sv=1&sig={SECRET}", "AWS_SECRET_ACCESS_KEY"),
        (f"model=https://me:{SECRET}@hub/owner/name", "HF_TOKEN"),
        (f"grpo.vllm_server_base_url=http://me:{SECRET}@host:8000", "~/.netrc"),
        (f"output_dir=ftp://me:{SECRET}@host/runs", "a folder on this machine"),
    ],
)
def test_addresses_with_a_secret_are_refused_unseen(setting: str, way: str) -> None:
    with pytest.raises(ConfigError, match="settings are saved and shown") as caught:
        load_config(None, [setting])
    told = str(caught.value)
    assert way in told
    for part in (SECRET, "hush", "Hush+99"):
        assert part not in told + repr(caught.value.problems)


@pytest.mark.parametrize("key", [HUB, AWS, "sk-proj-" + "aB3dE" * 8, "ghp_" + "aB3d" * 9])
@pytest.mark.parametrize(
    "setting", ["model.revision={}", "grpo.system=use {}", 'samples.prompts=["a", "{}"]']
)
def test_whole_keys_are_refused_in_any_text(setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match="holds an access key") as caught:
        load_config(None, [setting.format(key)])
    assert key not in str(caught.value) + repr(caught.value.problems)


@pytest.mark.parametrize(
    "setting",
    [
        "data=hf_answers_of_last_week_cleaned.jsonl",
        "data=sk-learn-questions-and-their-answers-2024.jsonl",
        "data=s3://bucket/team@company/rows.jsonl",
        "data.endpoint_url=http://127.0.0.1:9000/path@version",
        "data.endpoint_url=https://account.r2.cloudflarestorage.com",
        'samples.prompts=["What does git clone https://me:word@host do?"]',
        'samples.prompts=["Where do I put my HF_TOKEN?"]',
    ],
)
def test_what_is_no_secret_is_kept(tmp_path: Path, setting: str) -> None:
    config = load_config(None, [setting])
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_secret_that_code_has_put_in_is_not_dumped() -> None:
    config = Config()
    config.data.endpoint_url = f"https://me:{SECRET}@host"
    config.grpo.system = f"call with {HUB}"
    config.data.columns = {"text": AWS}
    with pytest.raises(ConfigError, match="3 problems") as caught:
        dump_config(config)
    for part in (SECRET, HUB, AWS):
        assert part not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{SECRET}@host/a",
        f"https://me:p@ss{SECRET}@host",
        f"https://{SECRET.replace('/', '')}@host and more",
        f"failed: 'https://me:{SECRET}@host:9000/x'",
    ],
)
def test_logins_are_hidden_whole(text: str) -> None:
    assert has_login(text)
    shown = without_secrets(text)
    for part in (SECRET, "hush", "Hush+99", "ss"):
        assert part not in shown
    assert "://(not shown)@host" in shown


def test_hiding_leaves_the_rest() -> None:
    text = '{"url": "http://host:8000/a", "mail": "me@host"} http://[::1]:8000/a b@c'
    assert without_secrets(text) == text
    code = "return hf_hub_download(**hf_quantizer_configuration_kwargs)"
    assert without_secrets(code) == code
    assert not has_key("AKIA and hf_ and sk- alone")


@pytest.mark.parametrize("verb", [["plan"], ["plan", "--json"], ["train"]])
def test_the_verbs_refuse_it_before_anything_is_written(
    trimtab: Trimtab, tiny_model: Path, tmp_path: Path, verb: list[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {tiny_model}\ndata: {{source: 's3://bucket/rows.jsonl', endpoint_url: 'https://me:{SECRET}@host'}}\n"
        f"output_dir: {tmp_path / 'run'}\n"
    )
    done = trimtab(*verb, str(config))
    assert done.returncode == 2
    assert "data.endpoint_url" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_nothing_that_a_run_keeps_holds_a_secret_of_the_environment(
    trimtab: Trimtab, tiny_model: Path, tiny_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HF_TOKEN", HUB), ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_ACCESS_KEY_ID", AWS)):
        monkeypatch.setenv(name, value)
    config, run = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(
        f"model: {tiny_model}\ndata: {tiny_rows}\ndevice: cpu\noutput_dir: {run}\n"
        "training: {max_steps: 1, batch_size: 8}\nmonitor: {progress: none}\n"
    )
    done = trimtab("train", str(config))
    assert done.returncode == 0, done.stderr
    said = [done.stdout, done.stderr, trimtab("report", str(run), "--json").stdout]
    kept = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert {"config.yaml", "plan.json", "metrics.jsonl", "summary.json", "report.html"} <= set(
        file.name for file in run.iterdir()
    )
    for secret in (HUB, SECRET, AWS):
        assert not [text for text in said if secret in text]
        assert not [raw for raw in kept if secret.encode() in raw or json.dumps(secret).encode() in raw]
