"""A secret is hidden by its value wherever a variable or a file of credentials holds it, in every way of writing it."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from trimtab.files import write_json_whole
from trimtab.monitor.metrics import MetricsFile
from trimtab.redaction import (
    has_key,
    has_login,
    has_signature,
    names_a_secret,
    secret_variable_in,
    without_secrets,
)

PLAIN = "wJalrXUtnFEMI/K7MDENG+bPx Rfi\"CY'EX"
"""Of no form that anybody knows: a slash, a plus, a space and both quotes."""


@pytest.mark.parametrize(
    "name", ["AWS_SECRET_ACCESS_KEY", "MY_TOKEN", "DB_PASSWORD", "OPENAI_API_KEY", "COMPANY_PAT", "x-api-key"]
)
def test_the_value_of_a_secret_variable_is_hidden_however_it_is_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, PLAIN)
    ways = [
        PLAIN,
        json.dumps({"a": PLAIN}),
        repr([PLAIN]),
        quote(PLAIN),
        f"https://h/?a={quote(PLAIN, safe='')}",
    ]
    for way in ways:
        shown = without_secrets(f"refused: {way}, sorry")
        assert "(not shown)" in shown
        assert "sorry" in shown
        assert not any(part in shown for part in ("wJalr", "MDENG", "Rfi", "CY"))


def test_a_password_in_the_address_of_a_proxy_is_hidden_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:tr0ub4dor@proxy:3128")
    assert without_secrets("407 for me with tr0ub4dor") == "407 for me with (not shown)"


@pytest.mark.parametrize(
    ("variable", "file", "content"),
    [
        ("HF_TOKEN_PATH", "token", "{}\n"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", "[default]\naws_secret_access_key = {}\n"),
        ("NETRC", "netrc", "machine api.example.com\n  login me\n  password {}\n"),
    ],
)
def test_what_the_files_of_credentials_hold_is_hidden(
    variable: str, file: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text(content.format("kQ9/stored+once"))
    monkeypatch.setenv(variable, str(tmp_path / file))
    assert without_secrets("denied kQ9/stored+once") == "denied (not shown)"
    assert without_secrets("me at api.example.com") == "me at api.example.com"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abc.DEF-123456",
        "headers {'authorization': 'Basic dXNlcjpwYXNzd29yZA=='}",
        "aws_secret_access_key = abcDEF123456/x",
        "client_secret=abcDEF123456",
        'password: "abcDEF123456"',
    ],
)
def test_what_stands_beside_the_name_of_a_secret_is_hidden(text: str) -> None:
    shown = without_secrets(text)
    assert "(not shown)" in shown
    assert not any(part in shown for part in ("123456", "dXNlc"))


def test_words_paths_and_switches_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SORT_KEY", "length")
    monkeypatch.setenv("TLS_KEY", str(tmp_path))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false123")
    monkeypatch.setenv("KEYBOARD", "qwertz99")
    for text in (
        "length",
        str(tmp_path),
        "false123",
        "qwertz99",
        "pad_token='<|endoftext|>'",
        "KeyError: 'tokens'",
    ):
        assert without_secrets(text) == text
    assert names_a_secret("WANDB_API_KEY")
    assert not names_a_secret("SSH_AUTH_SOCK")


def test_files_that_a_run_writes_hold_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", PLAIN)
    write_json_whole(tmp_path / "a.json", {PLAIN: [{"b": f"x {PLAIN} y"}], "path": Path(PLAIN)})
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(1, "train", {"loss": 0.5, "said": PLAIN})
    metrics.close()
    written = (tmp_path / "a.json").read_text() + (tmp_path / "metrics.jsonl").read_text()
    assert "MDENG" not in written
    assert written.count("(not shown)") == 4
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.5


def test_only_a_strong_value_makes_a_setting_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "smollm2")
    assert secret_variable_in("smollm2") is None
    monkeypatch.setenv("SOME_KEY", "9f8e7d6c5b4a39281706")
    assert secret_variable_in("rows-9f8e7d6c5b4a39281706.jsonl") == "SOME_KEY"


@pytest.mark.parametrize(
    "part",
    ["a", "://", "://a:", "?", "?key", "token?", "&key=", "x-", "proxy-auth_", "password=", "sk-", "\n"],
)
def test_a_long_text_that_almost_holds_secrets_is_gone_through_once(part: str) -> None:
    """Where the time grows with the square of the length or worse, this does not end within a test's limit."""
    text = part * (200_000 // len(part))
    hidden = without_secrets(f"{text} hf_{'a' * 30}")
    assert hidden.endswith("(not shown)")
    assert not has_key(text)
    assert not has_login(text)
    assert not has_signature(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://host/?key=abcdef",
        "Authorization: Bearer abcdefgh",
        "https://me:pass@host/?sig=x password: 'abc hf_aaaaaaaaaaaaaaa'",
        "password=abcdef-hf_aaaaaaaaaaaaaaa",
        "a://b?token=sk-aaaaaaaaaaaaaaa&c=d",
    ],
)
def test_what_is_hidden_already_stays_as_it_is(text: str) -> None:
    once = without_secrets(text)
    assert "(not shown)" in once
    assert "shown) shown)" not in once
    assert without_secrets(once) == once
