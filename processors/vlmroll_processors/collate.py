"""Prompts and completions -> padded tensors. The one place that pads.

Shapes: B rows, P longest prompt, C longest completion, T = P + C. Prompts are padded on the left and completions on
the right, so every completion starts in column P. Cutting, permuting or mixing the list changes nothing about a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from vlmroll_processors.continuation import Continuation
from vlmroll_processors.types import Join, JoinKind, Prompt

Continuations = Sequence[Continuation | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows of a batch that the model takes in one forward pass.

    Attributes:
        rows: which rows they are.
        forward_kwargs: the model's other inputs for them, `position_ids` always among them.
        prompts: their prompts, of the last turn where there are several; empty where they are not known.
    """

    rows: tuple[int, ...]
    forward_kwargs: Mapping[str, torch.Tensor]
    prompts: tuple[Prompt, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """The tensors of a batch, for one forward pass in nearly all families.

    Attributes:
        input_ids: [B, T] prompts, left-padded, then completions, right-padded.
        attention_mask: [B, T] 1 on real tokens.
        completion_mask: [B, C] 1 on completion tokens; C is 0 without completions.
        scored_mask: [B, C] 1 on those that are to be scored: what the model sampled.
        pieces: all rows in one piece, or more where the family would mix up rows with different numbers of pictures.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_mask: torch.Tensor
    scored_mask: torch.Tensor
    pieces: tuple[Piece, ...]

    @property
    def forward_kwargs(self) -> Mapping[str, torch.Tensor]:
        """The model's other inputs, of a batch in one piece."""
        if len(self.pieces) != 1:
            raise ValueError(f"the batch is in {len(self.pieces)} pieces; call `model_inputs` for each of them")
        (piece,) = self.pieces
        return piece.forward_kwargs

    @property
    def num_positions(self) -> int:
        """B T, padding included."""
        return self.input_ids.numel()

    @property
    def num_tokens(self) -> int:
        """How many of the places are no padding."""
        return int(self.attention_mask.sum())

    @property
    def completion_ids(self) -> torch.Tensor:
        """[B, C] the completions' ids."""
        return self.input_ids[:, self.input_ids.shape[1] - self.completion_mask.shape[1] :]

    def model_inputs(self, piece: Piece | None = None, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """A piece (by default the batch's only one) as keyword arguments of the model's forward.

        Args:
            dtype: what pixels and other numbers that are no ids are cast to: the model's own.
        """
        rows = slice(None) if piece is None else list(piece.rows)
        kwargs = self.forward_kwargs if piece is None else piece.forward_kwargs
        inputs = {"input_ids": self.input_ids[rows], "attention_mask": self.attention_mask[rows], **kwargs}
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


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
    continuations: Continuations | None = None,
    sampled: Sequence[Sequence[int]] | None = None,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> PaddedBatch:
    """Pad and join prompts, each followed by its completion.

    Args:
        prompts: B prompts; the siblings of a group bring the same object several times.
        completions: the ids of each row's completion; None for prompts alone.
        continuations: for completions of several turns what the turns added; None for the others.
        sampled: for each row 1 on the completion's ids that the model sampled, 0 on others; by default all were.
        pad_token_id: the id under padding.
        pad_to_multiple_of: round P and C up to a multiple of it.

    Raises:
        ValueError: no prompts, or as many completions as there are prompts are not given, or the ids of a completion
            are not those of its turns.

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
    wholes = wholes_of(prompts, completions, continuations)
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
    rules = rules_of(wholes)
    pieces = tuple(
        Piece(
            rows=tuple(rows),
            forward_kwargs=_join([(prompts[i], wholes[i]) for i in rows], rules, mask[rows], widths),
            prompts=tuple(wholes[i] for i in rows),
        )
        for rows in alike(wholes)
    )
    return PaddedBatch(
        input_ids=input_ids,
        attention_mask=mask,
        completion_mask=completion_mask,
        scored_mask=completion_mask if sampled is None else scored_of(sampled, completions, widths[1]),
        pieces=pieces,
    )


def wholes_of(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[int]], continuations: Continuations | None
) -> list[Prompt]:
    """For each row the prompt that has the tensors of all of its turns.

    Raises:
        ValueError: a continuation is not one of its row's prompt and completion.
    """
    if continuations is None:
        return list(prompts)
    wholes: list[Prompt] = []
    for i, (prompt, completion, turns) in enumerate(zip(prompts, completions, continuations, strict=True)):
        if turns is not None:
            turns.check(prompt, completion, where=f"row {i}")
        wholes.append(prompt if turns is None else turns.prompt)
    return wholes


def scored_of(sampled: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """[B, width] 1 where an id was sampled.

    Raises:
        ValueError: a mask is not as long as its completion.
    """
    for i, (mask, completion) in enumerate(zip(sampled, completions, strict=True)):
        if len(mask) != len(completion):
            raise ValueError(f"row {i}: the mask of sampled ids has {len(mask)} values for {len(completion)} ids")
    return pad([torch.tensor(mask, dtype=torch.long) for mask in sampled], 0, to=width)


def _join(
    rows: Sequence[tuple[Prompt, Prompt]], rules: Mapping[str, Join], mask: torch.Tensor, widths: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The forward kwargs of rows that go together, with their attention mask [B, T].

    Args:
        rows: the prompt of each row, and the prompt of its last turn.
    """
    kwargs = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    for name, rule in rules.items():
        parts = [whole.forward_kwargs.get(name) for _, whole in rows]
        if all(part is None for part in parts):
            continue
        if rule.kind is JoinKind.TOKENS:
            totals = [prompt.num_tokens + widths[1] for prompt, _ in rows]
            kwargs[name] = _join_tokens(name, parts, rule, totals, sum(widths))
        else:
            present = [part for part in parts if part is not None]
            if rule.kind is JoinKind.SAMPLES and len(present) < len(parts):
                if present[0].dim() < 2:
                    raise ValueError(f"one prompt lacks the per-sample input {name}; encode all by one adapter")
                nothing = present[0].new_empty((1, 0, *present[0].shape[2:]))
                present = [nothing if part is None else part for part in parts]
            kwargs[name] = pad_and_cat(present, rule)
    return kwargs


def alike(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The places of prompts that go into one batch together: all of them in most families.

    Example:
        >>> alike([Prompt(prompt_ids=(5,), engine_ids=(5,))] * 2)
        [[0, 1]]
    """
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.batch_key, []).append(i)
    return list(groups.values())


def rules_of(prompts: Sequence[Prompt]) -> dict[str, Join]:
    """The join rule of every kwarg that some prompt has; prompts of two families do not mix."""
    rules: dict[str, Join] = {}
    for prompt in prompts:
        for name in prompt.forward_kwargs:
            if rules.setdefault(name, prompt.join[name]) != prompt.join[name]:
                raise ValueError(f"prompts of different families in one batch: two join rules for {name}")
    return rules


def _join_tokens(
    name: str, parts: Sequence[torch.Tensor | None], rule: Join, totals: Sequence[int], width: int
) -> torch.Tensor:
    """[..., B, T, ...] with the batch axis before the token axis; each row is continued to its total."""
    rows: list[torch.Tensor] = []
    for part, total in zip(parts, totals, strict=True):
        if part is None:
            raise ValueError(f"one prompt of the batch lacks the per-token input {name}; encode all by one adapter")
        part = part.movedim(rule.token_axis, -1)
        rows.append(torch.cat([part, continuation(part, rule, total - part.shape[-1])], dim=-1))
    padded = pad(rows, rule.pad, left=True, to=width)
    # [B, ..., T] -> the batch axis where the token axis was, the token axis behind it.
    return padded.movedim(-1, rule.token_axis + 1).movedim(0, rule.token_axis)


def continuation(part: torch.Tensor, rule: Join, length: int) -> torch.Tensor:
    """What `length` completion tokens get of a per-token kwarg of the prompt, tokens on the last axis of both."""
    shape = (*part.shape[:-1], length)
    if rule.completion == "count_on":
        start = int(part[..., -1].max()) + 1  # prompts end in text, whose positions are alike on all axes
        return torch.arange(start, start + length).to(part.dtype).expand(shape)
    if rule.completion == "repeat":
        return part[..., -1:].expand(shape)
    return part.new_full(shape, rule.completion)


def pad_and_cat(parts: Sequence[torch.Tensor], rule: Join, axis: int = 0) -> torch.Tensor:
    """Concatenate on an axis; other axes that may differ (all but axis 0, in SAMPLES) are padded at their end."""
    may_differ = range(1, parts[0].dim()) if rule.kind is JoinKind.SAMPLES else rule.pad_axes
    for other in (other for other in may_differ if other != axis):
        width = max(part.shape[other] for part in parts)
        parts = [
            functional.pad(part, (0, 0) * (part.dim() - 1 - other) + (0, width - part.shape[other]), value=rule.pad)
            for part in parts
        ]
    return torch.cat(list(parts), axis)
