"""Multi-axis rotary positions (M-RoPE): a prompt's pictures decide its positions, so they are worked out with it.

The models' own `get_rope_index` gives the same numbers and is the oracle in the tests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmroll_processors.families.base import Tensors, Whole
from vlmroll_processors.types import Join, JoinKind

PATCHES: Mapping[str, Join] = {
    "pixel_values": Join(kind=JoinKind.ROWS),
    "image_grid_thw": Join(kind=JoinKind.ROWS),
    "mm_token_type_ids": Join(kind=JoinKind.TOKENS, pad=0, completion=0, prompt="marks"),
    "position_ids": Join(kind=JoinKind.TOKENS, pad=0, completion="count_on", token_axis=1),
}
"""The kwargs of families with a (t, h, w) grid for each picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One run of features: `t` x `h` x `w` merged patches from a token on; `step` is what one of `t` counts."""

    start: int
    t: int
    h: int
    w: int
    step: float = 1.0


def blocks_of(places: Sequence[int], grids: Iterable[Sequence[int]], merge: int, step: float = 1.0) -> list[Block]:
    """The blocks of one medium from the positions of its features and its (t, h, w) grids in patches."""
    found: list[Block] = []
    taken = 0
    for t, h, w in grids:
        block = Block(start=places[taken], t=t, h=h // merge, w=w // merge, step=step)
        found.append(block)
        taken += t * block.h * block.w
    return found


def grid_positions(whole: Whole) -> Tensors:
    """Positions [3, P] of a prompt whose pictures and videos have grids.

    Raises:
        ValueError: a video with a time scale, and no config that says how many positions a second has.
    """
    merge = whole.processor.image_processor.merge_size
    blocks: list[Block] = []
    for places, kwargs in zip(whole.places, whole.media, strict=True):
        (name,) = (name for name in kwargs if name.endswith("_grid_thw"))
        grids, step = kwargs[name].tolist(), 1.0
        if "second_per_grid_ts" in kwargs:
            step = float(_tokens_per_second(whole.config) * kwargs["second_per_grid_ts"][0])
        if places[-1] - places[0] >= len(places):  # text between the frames: each is a block of its own
            grids = [(1, h, w) for t, h, w in grids for _ in range(t)]
        blocks += blocks_of(places, grids, merge, step)
    return {"position_ids": mrope_positions(whole.num_tokens, blocks)}


def _tokens_per_second(config: Any) -> float:
    if config is None:
        raise ValueError(
            "the positions of a video depend on the model's config (tokens_per_second); load the adapter by the "
            "model's path or id, or as load_adapter(processor, config=model.config)"
        )
    loaded: Any = config() if callable(config) else config
    return loaded.vision_config.tokens_per_second


def mrope_positions(num_tokens: int, blocks: Sequence[Block]) -> torch.Tensor:
    """Positions [3, P] on the axes time, height and width.

    Text counts 1 by 1 on all axes; a block spans its own extent on each axis, and the text after it goes on behind the
    larger of height and width (Qwen2-VL, arXiv:2409.12191, section 2.1; with time steps Qwen2.5-VL, arXiv:2502.13923).
    """
    positions = torch.empty(3, num_tokens, dtype=torch.long)
    cursor = start = 0
    for block in blocks:
        text = block.start - cursor
        positions[:, cursor : block.start] = torch.arange(start, start + text)
        start += text
        axes = (torch.arange(block.t) * block.step).long(), torch.arange(block.h), torch.arange(block.w)
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
        cursor = block.start + grid.shape[1]
        positions[:, block.start : cursor] = grid + start
        start += max(block.h, block.w)  # time does not count, as in transformers since 5.3
    positions[:, cursor:] = torch.arange(start, start + num_tokens - cursor)
    return positions
