"""Completions that grow from the prompts they share: their rows, what the model needs for the next token of each.

Shapes: N prompts, P the longest of them, R rows, T tokens so far, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int

from vlmroll.attention import NotShareable
from vlmroll.generators.branch_cache import ROOM, BranchCache, RepeatedCache


class History:
    """The ids of each row, prompt included, in a buffer with room for more.

    Args:
        ids: [R, P], padded on the left.
        mask: [R, P] 0 on padding.
        room: most ids that are to come for a row.
    """

    def __init__(self, ids: Int[torch.Tensor, "R P"], mask: Int[torch.Tensor, "R P"], room: int) -> None:
        self.length = ids.shape[1]
        self._ids, self._mask = ids, mask
        self._widen(min(room, ROOM))

    def _widen(self, by: int) -> None:
        rows = len(self._ids)
        self._ids = torch.cat([self._ids, self._ids.new_zeros(rows, by)], dim=1)
        self._mask = torch.cat([self._mask, self._mask.new_ones(rows, by)], dim=1)

    @property
    def ids(self) -> Int[torch.Tensor, "R T"]:
        """All ids so far."""
        return self._ids[:, : self.length]

    @property
    def mask(self) -> Int[torch.Tensor, "R T"]:
        """0 on padding."""
        return self._mask[:, : self.length]

    def add(self, tokens: Int[torch.Tensor, " R"]) -> None:
        """One id more for each row."""
        if self.length == self._ids.shape[1]:
            self._widen(self.length)
        self._ids[:, self.length] = tokens
        self.length += 1

    def keep(self, rows: Int[torch.Tensor, " R"]) -> None:
        """Keep some rows."""
        self._ids, self._mask = self._ids[rows], self._mask[rows]


@dataclass(slots=True)
class Branches:
    """The rows that still grow: R of them, one for each unfinished completion.

    Attributes:
        completions: which completion a row is.
        prefilled: the model's cache of the prompts, until the first step.
        owners: prompt of each row, until the first step.
        cache: what the rows grow in, from the first step on.
        position: of the next token.
        logits: for the next token.
        axes: leading axes of the position ids, such as (3,).
        repeated: [R, 1, ...] per-token inputs that each new token gets from the last one.
        room: most tokens that the model is to be given for a row.
    """

    completions: list[int]
    prefilled: Any
    owners: list[int]
    prompt_mask: Int[torch.Tensor, "N P"]
    cache: BranchCache | RepeatedCache | None
    history: History
    position: Int[torch.Tensor, " R"]
    logits: Float[torch.Tensor, "R V"]
    axes: tuple[int, ...]
    repeated: Mapping[str, torch.Tensor]
    room: int

    def keep(self, alive: Sequence[int]) -> None:
        """Keep some rows, in ascending order."""
        rows = torch.tensor(alive, device=self.position.device)
        self.completions = [self.completions[row] for row in alive]
        if self.cache is None:
            self.owners = [self.owners[row] for row in alive]
        else:
            self.cache.keep(alive)
        self.history.keep(rows)
        self.position, self.logits = self.position[rows], self.logits[rows]
        self.repeated = {name: tensor[rows] for name, tensor in self.repeated.items()}

    def advance(self, model: Any, tokens: Int[torch.Tensor, " R"], *, share: bool) -> str | None:
        """Run every row one token further.

        Args:
            share: whether to let the rows share their prompts, where the model can.

        Returns:
            Why the model cannot, where that was found out.
        """
        self.history.add(tokens)
        reason: str | None = None
        if self.cache is None:
            reason = self._start(model, tokens, share=share)
        else:
            self._take(self.cache.forward(model, self.history.mask, **self._inputs(tokens)))
        self.position = self.position + 1
        return reason

    def _start(self, model: Any, tokens: Int[torch.Tensor, " R"], *, share: bool) -> str | None:
        """The first step, in which it turns out whether the model can share prompts."""
        reason: str | None = None
        prefilled, self.prefilled = self.prefilled, None
        if share:
            try:
                cache = BranchCache(prefilled, self.prompt_mask, self.owners, self.room)
                self._take(cache.forward(model, self.history.mask, **self._inputs(tokens)))
            except NotShareable as error:
                reason = str(error)
            else:
                self.cache = cache
                return None
        self.cache = RepeatedCache(prefilled, self.owners, self.position.device)
        self._take(self.cache.forward(model, self.history.mask, **self._inputs(tokens)))
        return reason

    def _inputs(self, tokens: Int[torch.Tensor, " R"]) -> dict[str, Any]:
        positions = self.position[:, None].expand(*self.axes, -1, 1)
        return {"input_ids": tokens[:, None], "position_ids": positions, **self.repeated}

    def _take(self, output: Any) -> None:
        self.logits = output.logits[:, -1]
