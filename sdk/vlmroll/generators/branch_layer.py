"""One layer of a key-value cache in which each prompt stands once, and the attention that reads it.

Shapes: N prompts, R rows, H heads, K key heads, D their size, P of the longest prompt, M what a layer keeps of it,
C rows of the prompt that has most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from vlmroll.attention import NotShareable


@dataclass(frozen=True, slots=True)
class Fold:
    """Which rows belong to which prompt, as a rectangle of prompts and places.

    Prompts with fewer rows than the others repeat their first one there, so that any number of rows is one product.

    Attributes:
        prompts: N.
        places: C, rows of the prompt that has most.
        chosen: row of each prompt and place; None where that is the order of the rows.
        back: prompt and place of each row.
    """

    prompts: int
    places: int
    chosen: Int[torch.Tensor, " NC"] | None
    back: Int[torch.Tensor, " R"] | None

    @classmethod
    def of(cls, owners: Sequence[int], device: torch.device) -> "Fold":
        """From the prompt of each row; each of the prompts 0 ... N - 1 has a row."""
        rows: list[list[int]] = [[] for _ in range(max(owners) + 1)]
        back: list[tuple[int, int]] = []
        for row, owner in enumerate(owners):
            back.append((owner, len(rows[owner])))
            rows[owner].append(row)
        places = max(map(len, rows))
        chosen = [some[min(i, len(some) - 1)] for some in rows for i in range(places)]
        if chosen == list(range(len(owners))):
            return cls(len(rows), places, None, None)
        flat = [owner * places + place for owner, place in back]
        return cls(len(rows), places, torch.tensor(chosen, device=device), torch.tensor(flat, device=device))

    def __call__(self, rows: Float[torch.Tensor, "R *rest"]) -> Float[torch.Tensor, "N C *rest"]:
        """Rows by prompt."""
        if self.chosen is not None:
            rows = rows.index_select(0, self.chosen.to(rows.device))
        return rows.view(self.prompts, self.places, *rows.shape[1:])

    def undo(self, folded: Float[torch.Tensor, "N C *rest"]) -> Float[torch.Tensor, "R *rest"]:
        """Rows in their order."""
        rows = folded.flatten(0, 1)
        return rows if self.back is None else rows.index_select(0, self.back.to(rows.device))


class BranchLayer(CacheLayerMixin):
    """One layer: the prompts' keys and values, and the rows' own.

    Args:
        prefilled: the layer of a cache that a model filled with the prompts.
        hidden: [N, P] padding of the prompts; None without padding.
        length: P.
        room: own tokens for which there is room at first.

    Raises:
        NotShareable: the layer holds something else than keys and values of all tokens or of a window.
    """

    def __init__(self, prefilled: Any, hidden: Bool[torch.Tensor, "N P"] | None, length: int, room: int) -> None:
        super().__init__()
        if type(prefilled) not in (DynamicLayer, DynamicSlidingWindowLayer) or not prefilled.is_initialized:
            raise NotShareable(f"it keeps {type(prefilled).__name__} in its cache")
        self.window: int | None = getattr(prefilled, "sliding_window", None)
        self.is_sliding = self.window is not None
        self.prompt_keys: torch.Tensor = prefilled.keys
        self.prompt_values: torch.Tensor = prefilled.values
        self.kept = length if self.window is None else min(length, self.window - 1)  # M
        if self.prompt_keys.shape[2] != self.kept:
            raise NotShareable(f"a layer keeps {self.prompt_keys.shape[2]} of {length} tokens of a prompt")
        self.hidden = None if hidden is None else hidden[:, length - self.kept :].to(self.prompt_keys.device)
        self.length, self.own, self.room = length, 0, room
        self.fresh: torch.Tensor | None = None  # the key of the step that is being taken
        self.fresh_value: torch.Tensor | None = None
        self.asked = False  # whether an attention came for it
        self._bias: torch.Tensor | None = None
        self._hide(self.hidden)

    def _hide(self, hidden: Bool[torch.Tensor, "N M"] | None) -> None:
        """Set which of the kept tokens are padding."""
        self.hidden = hidden if hidden is not None and bool(hidden.any()) else None
        if self.hidden is not None:
            zeros = torch.zeros(self.hidden.shape, dtype=self.prompt_keys.dtype, device=self.hidden.device)
            bias = zeros.masked_fill(self.hidden, float("-inf"))[:, None]
            self._bias = bias.repeat_interleave(self.prompt_keys.shape[1], 0)  # for each prompt and head
        else:
            self._bias = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the rows' own buffers, or larger ones."""
        larger: list[torch.Tensor] = []
        for old, states in ((self.keys, key_states), (self.values, value_states)):
            rows, heads, _, size = states.shape
            new = torch.empty(rows, heads, self.room, size, dtype=states.dtype, device=states.device)
            if old is not None:
                new[:, :, : self.own].copy_(old[:, :, : self.own])
            larger.append(new)
        self.keys, self.values = larger
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep one new token of each row. What is returned is only to be handed on to the attention."""
        if key_states.ndim != 4 or key_states.shape[1::2] != self.prompt_keys.shape[1::2] or key_states.shape[2] != 1:
            raise NotShareable("a layer caches new tokens in another way than those of the prompt")
        if self.fresh is not None:
            raise NotShareable("a layer caches a token twice")
        if self.own == self.room:
            self.room *= 2
            self.is_initialized = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None
            buffer.narrow(2, self.own, 1).copy_(states)
        self.own += 1
        self.fresh, self.fresh_value, self.asked = key_states, value_states, False
        return key_states, value_states

    def attend(
        self, query: Float[torch.Tensor, "R H 1 D"], fold: Fold, scaling: float | None
    ) -> Float[torch.Tensor, "R 1 H V"]:
        """Attention of each row's newest token over its prompt and its own tokens."""
        assert self.keys is not None
        assert self.values is not None
        rows, heads, _, size = query.shape
        shared = self.prompt_keys.shape[1]
        group, scale = heads // shared, size**-0.5 if scaling is None else scaling
        first = 0 if self.window is None else min(self.kept, max(0, self.kept + self.own - self.window))
        own = slice(0 if self.window is None else max(0, self.own - self.window), self.own)
        keys, values = (tensor[:, :, first:].flatten(0, 1) for tensor in (self.prompt_keys, self.prompt_values))
        own_keys, own_values = (tensor[:, :, own].flatten(0, 1) for tensor in (self.keys, self.values))

        def by_prompt(tensor: torch.Tensor) -> torch.Tensor:  # [R K, H / K, X] -> [N K, C H / K, X]
            folded = fold(tensor.view(rows, shared, group, -1)).transpose(1, 2)
            return folded.reshape(fold.prompts * shared, fold.places * group, tensor.shape[2])

        def by_row(tensor: torch.Tensor) -> torch.Tensor:
            folded = tensor.view(fold.prompts, shared, fold.places, group, tensor.shape[2])
            return fold.undo(folded.transpose(1, 2)).reshape(rows * shared, group, tensor.shape[2])

        each = query.reshape(rows * shared, group, size)
        bias = each.new_zeros(1, 1, 1) if self._bias is None else self._bias[..., first:]
        scores = torch.baddbmm(bias, by_prompt(each), keys.mT, alpha=scale)
        own_scores = torch.baddbmm(each.new_zeros(1, 1, 1), each, own_keys.mT, alpha=scale)
        joined = torch.cat([scores, by_prompt(own_scores)], dim=2)
        weights = joined.softmax(-1, dtype=torch.float32).to(values.dtype)
        split = keys.shape[1]
        found = by_row(torch.bmm(weights[..., :split], values))
        return found.baddbmm(by_row(weights[..., split:]), own_values).view(rows, 1, heads, -1)

    def keep_rows(self, alive: Int[torch.Tensor, " R"]) -> None:
        """Keep some rows, in ascending order, where the first ones stood."""
        packed: list[torch.Tensor] = []
        for buffer in (self.keys, self.values):
            assert buffer is not None
            packed.append(buffer[: len(alive)])
            packed[-1][:, :, : self.own] = buffer[:, :, : self.own].index_select(0, alive.to(buffer.device))
        self.keys, self.values = packed

    def keep_prompts(self, live: Int[torch.Tensor, " N"]) -> None:
        """Keep some prompts, in ascending order."""
        live = live.to(self.prompt_keys.device)
        self.prompt_keys = self.prompt_keys.index_select(0, live)
        self.prompt_values = self.prompt_values.index_select(0, live)
        self._hide(None if self.hidden is None else self.hidden[live])

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return self.length + self.own

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a mask is about, and the number of the first."""
        seen = self.get_seq_length()
        kept = seen if self.window is None else min(seen, self.window - 1)
        return kept + query_length, seen - kept

    def get_max_length(self) -> int:
        """No limit."""
        return -1
