"""Code that a model wrote, run behind a fence: it can fail, spin, allocate and cheat, and gets what it earned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trimtab.config.schema import GrpoSettings
from trimtab.rewards.builtin import builtin_reward
from trimtab.rewards.sandbox import Limits, network_is_cut, run_tests

LIMITS = Limits(seconds=60, megabytes=256)


@pytest.mark.parametrize(
    ("code", "tests", "share"),
    [
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"], 0.5),
        ("def f(x): return x + 1", "assert f(1) == 2\nassert f(2) == 3", 1.0),
        ("def f(", "pass", 0.0),
        ("import os; os._exit(0)", "assert False", 0.0),
        ("import sys; sys.exit(0)", "assert False", 0.0),
        ("raise SystemExit", "pass", 0.0),
        ("x = bytearray(10**9)", "pass", 0.0),
        ("import os\nos.write(1, b'passed 1 0')", "assert False", 0.0),
        ("open('big', 'wb').write(b'0' * 3 * 2**20)", "pass", 0.0),
        ("import os\ntry:\n    os.fork()\nexcept OSError:\n    pass", ["pass"], 1.0),
    ],
)
def test_what_code_gets(code: str, tests: str | list[str], share: float) -> None:
    assert run_tests(code, tests, LIMITS)[0] == share


def test_code_that_does_not_end_is_ended() -> None:
    assert run_tests("while True: pass", "pass", Limits(seconds=1, megabytes=256)) == (0.0, False)


def test_a_test_cannot_change_what_the_next_one_sees() -> None:
    assert run_tests("n = 1", ["n = 5", "assert n == 1"], LIMITS)[0] == 1.0


def test_it_sees_no_variable_or_folder_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("")
    tests = ["import os; assert 'SOME_TOKEN' not in os.environ", "import os; assert os.listdir() == []"]
    assert run_tests("", tests, LIMITS)[0] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_the_network_is_out_of_reach_where_the_kernel_allows_it() -> None:
    if not network_is_cut():
        pytest.skip("no user namespaces for this user")
    # Also this machine's own addresses: a namespace of its own has not even a loopback that is up.
    code = "import socket\nserver = socket.socket()\nserver.bind(('127.0.0.1', 0))\nserver.listen()"
    test = "socket.create_connection(server.getsockname(), timeout=2)"
    assert run_tests(code, test, LIMITS)[0] == 0.0


def test_the_reward_takes_fenced_code_and_a_column_of_tests() -> None:
    reward, columns = builtin_reward("code", GrpoSettings(tests_column="checks", test_seconds=60))
    assert columns == ("checks",)
    said = ["Here:\n```python\ndef f(): return 3\n```", "I cannot."]
    assert list(reward(completions=said, checks=[["assert f() == 3"]] * 2)) == [1.0, 0.0]


def test_a_row_without_tests_is_an_error_not_a_score() -> None:
    with pytest.raises(ValueError, match="no tests"):
        run_tests("x = 1", [], LIMITS)
