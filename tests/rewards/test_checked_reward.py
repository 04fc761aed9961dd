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


def test_a_coroutine_is_awaited() -> None:
    async def score(completions: list[str]) -> list[float]:
        return [0.25] * len(completions)

    assert call(score) == [0.25, 0.25]


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
        (lambda completions: [None, 0], "gave None", "said one"),
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
    with pytest.raises(RequestError, match="could not be imported"):
        loaded("reward=no_such_module_here:score")


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
