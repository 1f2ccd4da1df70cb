"""Prompts and completions -> padded tensors. The one place that pads.

Shapes: B rows, P longest prompt, C longest completion, T = P + C. Prompts are padded on the left and completions on
the right, so every completion starts in column P. Cutting, permuting or mixing the list changes nothing about a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from vlmroll_processors.types import Join, JoinKind, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """The tensors of one forward pass.

    Attributes:
        input_ids: [B, T] prompts, left-padded, then completions, right-padded.
        attention_mask: [B, T] 1 on real tokens.
        completion_mask: [B, C] 1 on completion tokens; C is 0 without completions.
        forward_kwargs: the model's other inputs, `position_ids` always among them.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_mask: torch.Tensor
    forward_kwargs: Mapping[str, torch.Tensor]

    @property
    def completion_ids(self) -> torch.Tensor:
        """[B, C] the completions' ids."""
        return self.input_ids[:, self.input_ids.shape[1] - self.completion_mask.shape[1] :]

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """All of it as keyword arguments of the model's forward."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, **self.forward_kwargs}


def pad(rows: Sequence[torch.Tensor], value: int | float, *, left: bool = False, to: int | None = None) -> torch.Tensor:
    """Stack tensors that differ in their last axis, padded with `value` to the longest (or to `to`): [B, ..., T]."""
    width = max(row.shape[-1] for row in rows) if to is None else to
    gaps = [width - row.shape[-1] for row in rows]
    sides = [(gap, 0) if left else (0, gap) for gap in gaps]
    return torch.stack([functional.pad(row, side, value=value) for row, side in zip(rows, sides, strict=True)])


def collate(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[int]] | None = None,
    *,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> PaddedBatch:
    """Pad and join prompts, each followed by its completion.

    Args:
        prompts: B prompts; the siblings of a group bring the same object several times.
        completions: the sampled ids of each row; None for prompts alone.
        pad_token_id: the id under padding.
        pad_to_multiple_of: round P and C up to a multiple of it.

    Raises:
        ValueError: no prompts, or as many completions as there are prompts are not given.

    Example:
        >>> prompt = Prompt(prompt_ids=(5, 6), engine_ids=(5, 6))
        >>> collate([prompt, prompt], [[7], [8, 9]], pad_token_id=0).input_ids
        tensor([[5, 6, 7, 0],
                [5, 6, 8, 9]])
    """
    completions = [()] * len(prompts) if completions is None else completions
    if not prompts or len(prompts) != len(completions):
        raise ValueError(f"collate needs one completion for each prompt, got {len(prompts)} and {len(completions)}")
    multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    if multiple < 1:
        raise ValueError(f"pad_to_multiple_of must be at least 1, got {multiple}")
    longest = max(prompt.num_tokens for prompt in prompts), max(len(completion) for completion in completions)
    widths = -(-longest[0] // multiple) * multiple, -(-longest[1] // multiple) * multiple
    ids = [torch.tensor(prompt.prompt_ids, dtype=torch.long) for prompt in prompts]
    tails = [torch.tensor(completion, dtype=torch.long) for completion in completions]
    prompt_mask = pad([torch.ones_like(row) for row in ids], 0, left=True, to=widths[0])
    completion_mask = pad([torch.ones_like(row) for row in tails], 0, to=widths[1])
    mask = torch.cat([prompt_mask, completion_mask], dim=1)
    input_ids = torch.cat(
        [pad(ids, pad_token_id, left=True, to=widths[0]), pad(tails, pad_token_id, to=widths[1])], dim=1
    )
    kwargs = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    for name, rule in _rules(prompts).items():
        parts = [prompt.forward_kwargs.get(name) for prompt in prompts]
        if rule.kind is JoinKind.TOKENS:
            kwargs[name] = _join_tokens(name, parts, rule, widths)
        elif rule.kind is JoinKind.SAMPLES and any(part is None for part in parts):
            raise ValueError(f"one prompt of the batch lacks the per-sample input {name}; encode all by one adapter")
        else:
            kwargs[name] = _join_rows([part for part in parts if part is not None], rule)
    return PaddedBatch(input_ids=input_ids, attention_mask=mask, completion_mask=completion_mask, forward_kwargs=kwargs)


def _rules(prompts: Sequence[Prompt]) -> dict[str, Join]:
    """The join rule of every kwarg that some prompt has; prompts of two families do not mix."""
    rules: dict[str, Join] = {}
    for prompt in prompts:
        for name in prompt.forward_kwargs:
            if rules.setdefault(name, prompt.join[name]) != prompt.join[name]:
                raise ValueError(f"prompts of different families in one batch: two join rules for {name}")
    return rules


def _join_tokens(name: str, parts: Sequence[torch.Tensor | None], rule: Join, widths: tuple[int, int]) -> torch.Tensor:
    """[..., B, T, ...] with the batch axis before the token axis."""
    rows: list[torch.Tensor] = []
    for part in parts:
        if part is None:
            raise ValueError(f"one prompt of the batch lacks the per-token input {name}; encode all by one adapter")
        part = part.movedim(rule.token_axis, -1)
        if rule.completion == "count_on":
            start = int(part.max()) + 1
            tail = torch.arange(start, start + widths[1]).to(part.dtype).expand(*part.shape[:-1], widths[1])
        else:
            tail = part.new_full((*part.shape[:-1], widths[1]), rule.completion)
        rows.append(torch.cat([part, tail], dim=-1))
    padded = pad(rows, rule.pad, left=True, to=sum(widths))
    # [B, ..., T] -> the batch axis where the token axis was, the token axis behind it.
    return padded.movedim(-1, rule.token_axis + 1).movedim(0, rule.token_axis)


def _join_rows(parts: Sequence[torch.Tensor], rule: Join) -> torch.Tensor:
    """Concatenate on axis 0; trailing axes that may differ are padded at their end."""
    axes = range(1, parts[0].dim()) if rule.kind is JoinKind.SAMPLES else rule.pad_axes
    for axis in axes:
        width = max(part.shape[axis] for part in parts)
        parts = [
            functional.pad(part, (0, 0) * (part.dim() - 1 - axis) + (0, width - part.shape[axis]), value=rule.pad)
            for part in parts
        ]
    return torch.cat(list(parts))
