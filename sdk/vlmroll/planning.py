"""Cutting rollouts into what the model takes in one forward pass: groups stay together, inside budgets.

What a token counts in the loss is settled before (`rollouts.weigh`), so a plan changes memory and time, no gradient.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from vlmroll.types import Rollout
from vlmroll_processors import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The most that goes through the model together.

    Attributes:
        completions: rollouts.
        tokens: of prompts and completions, a prompt counted once where its completions share it; None for no limit.
        patches: that the vision tower sees, with the numbers of a patch in `patch_size`; None for no limit.
        patch_size: how many numbers (pixels by channels by frames) make a patch.
        shared: whether prompts are run once for all of their completions.
    """

    completions: int
    tokens: int | None = None
    patches: int | None = None
    patch_size: int = 1
    shared: bool = True

    def patches_of(self, prompt: Prompt) -> int:
        """Vision patches of a prompt, padding included."""
        sizes = (tensor.numel() for tensor in prompt.forward_kwargs.values() if tensor.is_floating_point())
        return -(-sum(sizes) // self.patch_size)

    def holds(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether these fit."""
        if len(rollouts) > self.completions:
            return False
        prompts = [rollout.prompt for rollout in rollouts]
        if self.shared:
            prompts = list({id(prompt): prompt for prompt in prompts}.values())
        if self.tokens is not None:
            lengths = [len(rollout.completion.completion_ids) for rollout in rollouts]
            own = [prompt.num_tokens for prompt in prompts]
            padded = len(rollouts) * (max(own) + max(lengths))
            if (sum(own) + sum(lengths) if self.shared else padded) > self.tokens:
                return False
        return self.patches is None or sum(map(self.patches_of, prompts)) <= self.patches


def plan(rollouts: Sequence[Rollout], budget: Budget) -> list[list[Rollout]]:
    """Cut rollouts into pieces inside a budget, in their order.

    A group is cut only where it does not fit as a whole, and a rollout that is over the budget goes alone.

    Example:
        >>> [len(piece) for piece in plan(two_groups_of_four, Budget(completions=6))]  # doctest: +SKIP
        [4, 4]
    """
    pieces: list[list[Rollout]] = []
    for group in _groups(rollouts):
        if pieces and budget.holds([*pieces[-1], *group]):
            pieces[-1] += group
        elif budget.holds(group):
            pieces.append(list(group))
        else:
            pieces += _cut(group, budget)
    return pieces


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Runs of rollouts of one prompt."""
    groups: list[list[Rollout]] = []
    for rollout in rollouts:
        if groups and groups[-1][0].prompt is rollout.prompt:
            groups[-1].append(rollout)
        else:
            groups.append([rollout])
    return groups


def _cut(group: Sequence[Rollout], budget: Budget) -> list[list[Rollout]]:
    pieces: list[list[Rollout]] = []
    for rollout in group:
        if pieces and budget.holds([*pieces[-1], rollout]):
            pieces[-1].append(rollout)
            continue
        if not budget.holds([rollout]):
            logger.warning(
                "row %d: one completion with its prompt is over the budget of a micro-batch (%d tokens, %d vision "
                "patches); it goes through the model alone",
                rollout.row_id,
                rollout.prompt.num_tokens + len(rollout.completion.completion_ids),
                budget.patches_of(rollout.prompt),
            )
        pieces.append([rollout])
    return pieces


def deal(pieces: Sequence[list[Rollout]], count: int) -> list[list[list[Rollout]]]:
    """Deal pieces out to `count` micro-steps, in their order, as evenly as it goes.

    Example:
        >>> [len(dealt) for dealt in deal([[], [], []], 2)]
        [2, 1]
    """
    share, more = divmod(len(pieces), max(1, count))
    sizes = [share + (i < more) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]
    return [list(pieces[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
