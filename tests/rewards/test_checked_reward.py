"""A reward function gets the arguments that it takes, and is held to one finite number for each completion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import ConfigError, load_config
from trimtab.errors import RequestError
from trimtab.rewards import RewardError, Rewards, load_rewards
from trimtab.rewards.check import CheckedReward

COLUMNS = {"answer": ["1", "2"], "completion_ids": [[1], [2]], "trainer_state": None}


def call(function: Callable[..., Any], *, may_skip: bool = False) -> list[Any]:
    reward = CheckedReward("mine:score", function, may_skip=may_skip)
    return reward(["ask one", "ask two"], ["said one", "said two"], **COLUMNS)


def test_only_the_arguments_that_it_names_are_passed() -> None:
    assert call(lambda completions: [len(c) for c in completions]) == [8.0, 8.0]
    assert call(lambda answer, completions: [int(a) for a in answer]) == [1.0, 2.0]
    assert call(lambda **everything: [len(everything)] * 2) == [5.0, 5.0]
    assert call(lambda completions, weight=0.5: [weight] * 2) == [0.5, 0.5]
    reward = CheckedReward("mine:score", lambda **columns: columns["self"], may_skip=False)
    assert reward(prompts=["a"], completions=["b"], **{"self": [0.5]}) == [0.5]


def test_a_coroutine_is_awaited() -> None:
    async def score(completions: list[str]) -> list[float]:
        return [0.25] * len(completions)

    assert call(score) == [0.25, 0.25]


def test_of_a_coroutine_too_the_completion_is_found_that_it_fails_on() -> None:
    async def score(completions: list[str]) -> list[float]:
        return [float(c == "said one" or 1 / 0) for c in completions]

    with pytest.raises(RewardError, match="ZeroDivisionError") as stopped:
        call(score)
    assert "said two" in str(stopped.value)


def test_numbers_of_other_kinds_count() -> None:
    torch = pytest.importorskip("torch")
    assert call(lambda completions: torch.tensor([0.5, 1.0])) == [0.5, 1.0]
    assert call(lambda completions: (True, 0)) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "told", "shown"),
    [
        (lambda completions: [1.0], "gave 1 values for 2 completions", "said two"),
        (lambda completions: [1.0] * 3, "gave 3 values for 2 completions", "said two"),
        (lambda completions: [0.0, float("nan")], "gave nan for completion 1", "said two"),
        (lambda completions: [float("inf"), 0], "gave inf for completion 0", "said one"),
        (lambda completions: ["good", 0], "'good', which is no number", "said one"),
        (lambda completions: ["1", "0"], "'1', which is no number", "said one"),
        (lambda completions: [0, b"1"], "which is no number for completion 1", "said two"),
        (lambda completions: "10", "gave a str, not a list", "said one"),
        (lambda completions: {1: 0.5, 2: 0.5}, "gave a dict, not a list", "said one"),
        (lambda completions: [0, 10**400], "gave inf for completion 1", "said two"),
        (lambda completions: [-1e30, 0], "gave -1e+30, whose square", "said one"),
        (lambda completions: [None, 0], "gave None", "said one"),
        (lambda completions: completions.clear() or [], "gave 0 values for 2 completions", "said one"),
        (lambda completions, answer: (1 / (int(a) - 2) for a in answer), "ZeroDivisionError", "said two"),
        (lambda answer: [exit(0) if a == "2" else 0.0 for a in answer], "SystemExit: 0", "said two"),
        (lambda completions: 1.0, "gave a float, not a list", "said one"),
        (lambda completions, answer: [1 / (int(a) - 2) for a in answer], "ZeroDivisionError", "said two"),
    ],
)
def test_a_broken_promise_stops_with_the_sample(function: Any, told: str, shown: str) -> None:
    with pytest.raises(RewardError) as stopped:
        call(function)
    text = str(stopped.value)
    assert told in text
    assert shown in text
    assert "mine:score" in text
    assert "answer:" in text
    assert ("test_checked_reward.py, line " in text) == ("raised" in text)


def test_of_a_builtin_reward_it_is_the_row_that_is_to_be_changed() -> None:
    (reward,) = loaded("reward=answer").functions
    with pytest.raises(RewardError, match="no right answer") as stopped:
        reward(["ask"], ["said"], answer=[None])
    assert "change: repair the row" in str(stopped.value)


def test_none_says_does_not_apply_where_another_reward_counts() -> None:
    assert call(lambda completions: [None, 1.0], may_skip=True) == [None, 1.0]


def loaded(*settings: str) -> Rewards:
    return load_rewards(load_config(None, ["recipe=grpo", *settings]))


def test_functions_by_module_with_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_scores.py").write_text(
        "LIMIT = 3\ndef short(completions): return [0.0] * len(completions)\n"
        "def other(completions, hint): return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = loaded("reward={answer: 2, my_scores:short: 0.5, my_scores:other: 1}")
    assert [f.__name__ for f in rewards.functions] == ["answer", "short", "other"]
    assert rewards.weights == [2, 0.5, 1]
    (line_one, line_two) = rewards.missing(["question"])
    assert "answer reads answer" in line_one
    assert "my_scores:other reads hint" in line_two
    assert rewards.missing(["answer", "hint"]) == []
    with pytest.raises(RequestError, match="my_scores has no `shrt`") as wrong:
        loaded("reward=my_scores:shrt")
    assert "short, other" in str(wrong.value)
    with pytest.raises(RequestError, match="this is a int"):
        loaded("reward=my_scores:LIMIT")
    with pytest.raises(RequestError, match="no signature found"):
        loaded("reward=builtins:max")
    with pytest.raises(RequestError, match="could not be imported"):
        loaded("reward=no_such_module_here:score")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("def score(:", "SyntaxError"),
        ("LIMIT = 1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("import no_such_package.inside", "install no_such_package, which fails_{} imports"),
        ("from json import no_such_name", "cannot import name 'no_such_name'"),
    ],
)
def test_a_module_that_fails_says_where(
    content: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"fails_{abs(hash(content))}"
    (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RequestError, match="could not be imported") as wrong:
        loaded(f"reward={name}:score")
    assert told.format(name.removeprefix("fails_")) in str(wrong.value)
    assert name in str(wrong.value)


@pytest.mark.parametrize("name", [":score", ".near:score"])
def test_a_name_without_a_module(name: str) -> None:
    with pytest.raises(RequestError, match="could not be imported"):
        loaded(f"reward={name}")


def test_a_module_that_hides_gpus_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hides_gpus.py").write_text(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\ndef score(completions): return []\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RequestError, match="too late"):
        loaded("reward=hides_gpus:score")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("", "nothing says which"),
        ("reward=anser", "'anser', which is no reward"),
        ("reward=format", "is not set; the reward `format` needs it"),
        ("reward=format grpo.pattern=(a", "is no regular expression"),
        ("reward=answer use_vllm=true model_parallel=true", "shares the GPUs with a split model"),
    ],
)
def test_settings_that_cannot_stand(settings: str, told: str) -> None:
    with pytest.raises(ConfigError, match="problem") as wrong:
        load_config(None, ["recipe=grpo", *settings.split()])
    assert told in str(wrong.value)
