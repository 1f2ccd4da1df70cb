"""Rewards: plain functions, async functions and sequence-classification models, scored together.

A reward function takes keyword arguments and returns one number, or None, for each completion:

    def brief(completions, **kwargs):
        return [-len(c[0]["content"]) for c in completions]

It is given `prompts`, `completions` (strings for string prompts, else a list of messages: one of the assistant, or
those of all turns where there are tools), `completion_ids`, `images` (the normalised pictures of each prompt, a list
for each), `environments` where there are some, `trainer_state`, `log_metric(name, value)`, `log_extra(column, values)`,
every other column of the row and what a `rollout_func` added; it takes those that it names, or all by `**kwargs`.
"""

from vlmroll.rewards.base import RewardFunc, RewardSuite
from vlmroll.rewards.model import ModelReward

__all__ = ["ModelReward", "RewardFunc", "RewardSuite"]
