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
        patches: that the vision tower sees, each distinct prompt counted once, with what later turns added to it; None
            for no limit.
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
        shown = {id(prompt): prompt for rollout in rollouts for prompt in rollout.shown}
        prompts = list({id(prompt): prompt for prompt in prompts}.values()) if self.shared else prompts
        if self.tokens is not None:
            lengths = [len(rollout.completion.completion_ids) for rollout in rollouts]
            own = [prompt.num_tokens for prompt in prompts]
            padded = len(rollouts) * (max(own) + max(lengths))
            if (sum(own) + sum(lengths) if self.shared else padded) > self.tokens:
                return False
        return self.patches is None or sum(map(self.patches_of, shown.values())) <= self.patches


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
        pieces.append([rollout])
    return pieces


def warn_of_large(pieces: Sequence[Sequence[Rollout]], budget: Budget, told: set[int]) -> None:
    """Name the rows of rollouts that are over the budget by themselves, but those that were `told` before."""
    for rollout in (piece[0] for piece in pieces if len(piece) == 1 and not budget.holds(piece)):
        if rollout.row_id not in told:
            told.add(rollout.row_id)
            logger.warning(
                "row %d: one completion with its prompt is over the budget of a micro-batch (%d tokens, %d vision "
                "patches); it goes through the model alone",
                rollout.row_id,
                rollout.prompt.num_tokens + len(rollout.completion.completion_ids),
                sum(map(budget.patches_of, rollout.shown)),
            )


def deal(pieces: Sequence[list[Rollout]], count: int) -> list[list[list[Rollout]]]:
    """Deal pieces out to `count` micro-steps, in their order, as evenly as it goes; no micro-step goes without.

    Raises:
        ValueError: there are fewer rollouts than micro-steps.

    Example:
        >>> [len(dealt) for dealt in deal([one, another, a_third], 2)]  # doctest: +SKIP
        [2, 1]
    """
    dealt = list(pieces)
    while len(dealt) < count:
        largest = max(range(len(dealt)), key=lambda i: len(dealt[i]), default=None)
        if largest is None or len(dealt[largest]) < 2:
            raise ValueError(f"{len(dealt)} rollouts cannot fill {count} micro-steps; generate more of them")
        piece = dealt[largest]
        dealt[largest : largest + 1] = [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    share, more = divmod(len(dealt), max(1, count))
    sizes = [share + (i < more) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]
    return [dealt[start : start + size] for start, size in zip(starts, sizes, strict=True)]
