"""Run: rewards, which score completions. Built-in ones and functions of the user's own; never touches a device."""

from trimtab.rewards.check import RewardError
from trimtab.rewards.load import Rewards, load_rewards

__all__ = ["RewardError", "Rewards", "load_rewards"]
