"""Attention over a packed row, in which a prompt stands once for all of its completions (`vlmroll_processors.pack`).

`switch_on` gives a model of transformers an attention function of ours in the place of "sdpa", which it behaves like
unless it finds a packed layout in the place of the mask. The layout travels as a mask because masks reach every layer
of every model, also when layers are computed again in the backward pass.

Each prompt attends to itself, causally. The completions of a prompt, padded to the longest of them, are one batch whose
keys are the prompt's, shared, and their own.

Shapes: H heads, K key heads, D their size, T tokens of the row, P of a prompt, G completions of it, C the longest.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "vlmroll_shared_sdpa"
_LIKE = "sdpa"
_NOT_TAKEN = ("position_bias", "s_aux", "softcap", "cache")
_LAYERS = frozenset({"full_attention", "sliding_attention"})


Attention = Callable[..., tuple[torch.Tensor, None]]
in_place_of: ContextVar[Attention | None] = ContextVar("in_place_of", default=None)
"""Attention over another layout, such as a cache that shares prompts, for calls without gradient. It is called as
attention functions of transformers are."""


class NotShareable(ValueError):
    """The model's attention does something that attention over a packed row does not do."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and its completions in the packed row, by their lengths."""

    prompt: int
    completions: tuple[int, ...]

    @property
    def rows(self) -> int:
        """G, the number of completions."""
        return len(self.completions)

    @property
    def longest(self) -> int:
        """C, tokens of the longest completion."""
        return max(self.completions, default=0)

    @property
    def is_even(self) -> bool:
        """Whether all completions are equally long."""
        return len(set(self.completions)) <= 1


@lru_cache(maxsize=256)
def segments_of(numbers: tuple[int, ...]) -> tuple[Segment, ...]:
    """The parts of a packed row, from the numbers of `PackedPiece.layout`.

    Example:
        >>> segments_of((5, 2, 3, 4))
        (Segment(prompt=5, completions=(3, 4)),)
    """
    found: list[Segment] = []
    while numbers:
        prompt, count, *rest = numbers
        found.append(Segment(prompt, tuple(rest[:count])))
        numbers = tuple(rest[count:])
    return tuple(found)


def switch_on(model: Any) -> None:
    """Let a model, or the one inside a PEFT model, take packed rows.

    Raises:
        NotShareable: says why it cannot.
    """
    config = _text_config(model)
    if config._attn_implementation == NAME:
        return
    if config._attn_implementation != _LIKE:
        raise NotShareable(f'its attention is {config._attn_implementation!r}; load it with attn_implementation="sdpa"')
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        raise NotShareable(f"it has layers of another kind: {', '.join(sorted(others))}")
    if getattr(model, "_is_stateful", False):
        raise NotShareable("its layers carry a state from token to token")
    config._attn_implementation = NAME


def switch_off(model: Any) -> None:
    """Give the model its own attention back, for engines that look at its name."""
    config = _text_config(model)
    if config._attn_implementation == NAME:
        config._attn_implementation = _LIKE


def _text_config(model: Any) -> Any:
    base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    return base.config.get_text_config()


def shared_attention(
    module: Any,
    query: Float[torch.Tensor, "B H T D"],
    key: Float[torch.Tensor, "B K S D"],
    value: Float[torch.Tensor, "B K S V"],
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[Float[torch.Tensor, "B T H V"], None]:
    """An attention function of transformers: "sdpa", and attention over a packed row where the mask is its layout.

    Args:
        options: those of "sdpa", such as dropout and scaling, and `sliding_window`, how many keys a token sees.
    """
    if (other := in_place_of.get()) is not None:
        return other(module, query, key, value, attention_mask, **options)
    if attention_mask is None or attention_mask.dtype is not torch.long or attention_mask.ndim != 4:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if unknown := [name for name in _NOT_TAKEN if options.get(name) is not None]:
        raise NotShareable(f"its attention takes {unknown[0]}")
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise NotShareable("some of its attention is not causal")
    chosen = _Options(
        dropout=options.get("dropout", 0.0),
        scaling=options.get("scaling"),
        window=options.get("sliding_window"),
        grouped=query.shape[1] != key.shape[1],
    )
    outputs: list[torch.Tensor] = []
    start = 0
    for segment in segments_of(tuple(attention_mask.flatten().tolist())):
        middle, end = start + segment.prompt, start + segment.prompt + sum(segment.completions)
        prompt = [tensor[:, :, start:middle] for tensor in (query, key, value)]
        outputs.append(_over_prompt(prompt, chosen))
        if end > middle:
            tails = [tensor[0, :, middle:end] for tensor in (query, key, value)]
            outputs.append(_over_completions(tails, prompt[1:], segment, chosen))
        start = end
    assert start == query.shape[2], "the layout is of another row"
    return torch.cat(outputs, dim=2).transpose(1, 2), None


@dataclass(frozen=True, slots=True)
class _Options:
    dropout: float
    scaling: float | None
    window: int | None
    grouped: bool  # fewer key heads than query heads

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., H, T, V]; causal without a mask."""
        options: dict[str, Any] = {"dropout_p": self.dropout, "scale": self.scaling}
        if mask is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped, **options)
        # Query heads that share a key head are further queries of it: with a mask, CUDA has no fast kernel for groups.
        times = query.shape[-3] // key.shape[-3]
        query = query.unflatten(-3, (-1, times)).flatten(-3, -2)
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask.repeat(times, 1), **options)
        return found.unflatten(-2, (times, -1)).flatten(-4, -3)


def _over_prompt(states: Sequence[torch.Tensor], options: _Options) -> torch.Tensor:
    """[1, H, P, V] of a prompt's query, key and value."""
    query, key, value = states
    length = query.shape[2]
    if options.window is None or length <= options.window:
        return options.attend(query, key, value)
    return options.attend(query, key, value, _mask(length, 0, options.window, str(query.device)))


def _over_completions(
    tails: Sequence[torch.Tensor], prompt: Sequence[torch.Tensor], segment: Segment, options: _Options
) -> torch.Tensor:
    """[1, H, N, V] of all completions of a prompt.

    Args:
        tails: [H or K, N, D] their query, key and value.
        prompt: [1, K, P, D] its key and value.
    """
    device = tails[0].device
    rows, longest = segment.rows, segment.longest
    if not segment.is_even:
        places = _places(segment.completions, str(device))
        tails = [tensor.index_select(1, places) for tensor in tails]
    query, key, value = (tensor.unflatten(1, (rows, longest)).transpose(0, 1) for tensor in tails)
    shared = [tensor.expand(rows, -1, -1, -1) for tensor in prompt]
    mask = _mask(longest, segment.prompt, options.window, str(device))
    key, value = (torch.cat(pair, dim=2) for pair in zip(shared, (key, value), strict=True))
    found = options.attend(query, key, value, mask).transpose(0, 1).flatten(1, 2)
    if not segment.is_even:
        found = found.index_select(1, _real(segment.completions, str(device)))
    return found[None]


@lru_cache(maxsize=8)  # it serves the layers of a pass; masks are large, and seldom come again
@torch.inference_mode(False)
def _mask(length: int, before: int, window: int | None, device: str) -> Bool[torch.Tensor, "C S"]:
    """Which of `before` shared and `length` own keys each of `length` queries sees."""
    own = torch.arange(before, before + length, device=device)[:, None]
    keys = torch.arange(before + length, device=device)
    seen = keys <= own
    return seen if window is None else seen & (keys > own - window)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _places(lengths: tuple[int, ...], device: str) -> Int[torch.Tensor, " GC"]:
    """Where each token of the padded completions is taken from; padding repeats a completion's first token."""
    longest, start, found = max(lengths), 0, list[torch.Tensor]()
    total = sum(lengths)
    for length in lengths:
        steps = torch.arange(longest)
        found.append((start + steps.where(steps < length, 0)).clamp(max=total - 1))
        start += length
    return torch.cat(found).to(device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _real(lengths: tuple[int, ...], device: str) -> Int[torch.Tensor, " N"]:
    """Where the tokens that are no padding stand in the padded completions."""
    steps = torch.arange(max(lengths))
    return (steps < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0].to(device)


AttentionInterface.register(NAME, shared_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
