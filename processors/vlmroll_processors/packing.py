"""Prompts and completions -> one row, in which each prompt stands once, followed by all of its completions.

    prompt A | completion A1 | completion A2 | prompt B | completion B1 | ...

A token attends to its own prompt and to its own completion, nothing else; `PackedPiece.layout` says where they are, and
positions of every completion go on from its prompt. No prompt is there twice, and nothing is padded but the end of the
row, on request. A completion of several turns brings the pictures that its turns added.
`vlmroll_processors.collate` makes the padded counterpart.

Shapes: B rows of the batch, C longest completion, N completion tokens, T tokens of a packed row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlmroll_processors.collate import (
    Continuations,
    alike,
    continuation,
    pad,
    pad_and_cat,
    rules_of,
    scored_of,
    wholes_of,
)
from vlmroll_processors.types import Join, JoinKind, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPiece:
    """A packed row, which the model takes in one forward pass.

    Attributes:
        input_ids: [1, T].
        layout: [1, 1, 1, K] whole numbers: for each prompt its length, the number of its completions, and the length of
            each. It goes through the model in the place of an attention mask.
        forward_kwargs: the model's other inputs, `position_ids` always among them.
        prompts: the prompts in their order, each once, and behind each what the turns of its completions added.
    """

    input_ids: torch.Tensor
    layout: torch.Tensor
    forward_kwargs: Mapping[str, torch.Tensor]
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """The tensors of a batch whose rows share their prompts.

    The last token of a completion predicts nothing and is left out of the packed row.

    Attributes:
        completion_ids: [B, C] the completions' ids, right-padded.
        completion_mask: [B, C] 1 on completion tokens.
        scored_mask: [B, C] 1 on those that are to be scored: what the model sampled.
        pieces: one, or more where the family would mix up prompts with different numbers of pictures.
        predictors: [N] for each token to be scored, row by row, which token of all pieces, one after the other,
            predicts it: the last one of the prompt predicts the first one.
        num_tokens: of all pieces, padding left out.
    """

    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    scored_mask: torch.Tensor
    pieces: tuple[PackedPiece, ...]
    predictors: torch.Tensor
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Tokens of all pieces, padding included."""
        return sum(piece.input_ids.numel() for piece in self.pieces)

    def model_inputs(self, piece: PackedPiece, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """A piece as keyword arguments of the model's forward; see `PaddedBatch.model_inputs`."""
        inputs = {"input_ids": piece.input_ids, "attention_mask": piece.layout, **piece.forward_kwargs}
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def pack(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[int]],
    *,
    continuations: Continuations | None = None,
    sampled: Sequence[Sequence[int]] | None = None,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> PackedBatch:
    """Put prompts and their completions into one row.

    Args:
        prompts: B prompts; the siblings of a group bring the same object several times.
        completions: the ids of each row's completion, at least one.
        continuations, sampled: as in `collate`.
        pad_token_id: the id under padding.
        pad_to_multiple_of: make T a multiple of it, by padding at its end.

    Raises:
        ValueError: no prompts, or not one completion, with a token, for each, or its ids are not those of its turns.

    Example:
        >>> prompt = Prompt(prompt_ids=(5, 6), engine_ids=(5, 6))
        >>> batch = pack([prompt, prompt], [[7, 3], [8, 9, 3]], pad_token_id=0)
        >>> batch.pieces[0].input_ids, batch.pieces[0].forward_kwargs["position_ids"]
        (tensor([[5, 6, 7, 8, 9]]), tensor([[0, 1, 2, 2, 3]]))
        >>> batch.predictors
        tensor([1, 2, 1, 3, 4])
    """
    if not prompts or len(prompts) != len(completions) or not all(completions):
        raise ValueError(f"pack needs a completion for each prompt, got {len(prompts)} and {len(completions)}")
    tails = [torch.tensor(completion, dtype=torch.long) for completion in completions]
    wholes = wholes_of(prompts, completions, continuations)
    rows = _rows(prompts, wholes, continuations, tails)
    rules = rules_of(wholes)
    mask = pad([torch.ones_like(tail) for tail in tails], 0)
    scored = mask if sampled is None else scored_of(sampled, completions, mask.shape[1])
    pieces: list[PackedPiece] = []
    predictors: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    start = padded = 0
    for places in _apart(rows, wholes, rules):
        groups: dict[int, list[int]] = {}
        for place in places:
            groups.setdefault(id(rows[place].lead), []).append(place)
        for members in groups.values():
            start += rows[members[0]].length
            last = start - 1
            for place in members:
                length = len(rows[place].ids)
                predictors[place] = torch.cat([torch.tensor([last]), torch.arange(start, start + length)])
                start += length
        padding = -start % (pad_to_multiple_of or 1)
        start, padded = start + padding, padded + padding
        pieces.append(_piece([[rows[i] for i in members] for members in groups.values()], rules, pad_token_id, padding))
    chosen = [places[mask[: len(places)].bool()] for places, mask in zip(predictors, scored, strict=True)]
    return PackedBatch(
        completion_ids=pad(tails, pad_token_id),
        completion_mask=mask,
        scored_mask=scored,
        pieces=tuple(pieces),
        predictors=torch.cat(chosen),
        num_tokens=start - padded,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A completion in a packed row.

    Attributes:
        lead: the prompt whose first `length` tokens it shares with the other completions that have this lead.
        ids: of the completion, but the last one.
        whole: has the tensors of all of its turns.
        added: what its turns added and `lead` lacks.
    """

    lead: Prompt
    length: int
    ids: torch.Tensor
    whole: Prompt
    added: Prompt | None


def _rows(
    prompts: Sequence[Prompt],
    wholes: Sequence[Prompt],
    continuations: Continuations | None,
    tails: Sequence[torch.Tensor],
) -> list[_Row]:
    turns = [None] * len(prompts) if continuations is None else continuations
    return [
        _Row(
            lead=prompt if its is None or its.alike else whole,
            length=prompt.num_tokens,
            ids=tail[:-1],
            whole=whole,
            added=its.added if its is not None and its.alike else None,
        )
        for prompt, whole, its, tail in zip(prompts, wholes, turns, tails, strict=True)
    ]


def _apart(rows: Sequence[_Row], wholes: Sequence[Prompt], rules: Mapping[str, Join]) -> list[list[int]]:
    """The places of rows that go into one piece.

    What is repeated for every token points at the prompt's own pictures, so that others must not stand beside them.
    """
    if not any(rule.completion == "repeat" for rule in rules.values()):
        return alike(wholes)
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(id(row.lead), []).append(i)
    return list(groups.values())


def _piece(groups: Sequence[Sequence[_Row]], rules: Mapping[str, Join], pad_token_id: int, padding: int) -> PackedPiece:
    """One packed row; padding stands at its end like a prompt without completions."""
    layout = [n for rows in groups for n in (rows[0].length, len(rows), *(len(row.ids) for row in rows))]
    layout += [padding, 0] if padding else []
    ids = [
        part
        for rows in groups
        for part in (torch.tensor(rows[0].lead.prompt_ids[: rows[0].length]), *(row.ids for row in rows))
    ]
    prompts = [
        prompt for rows in groups for prompt in (rows[0].lead, *(row.added for row in rows)) if prompt is not None
    ]
    kwargs = {"position_ids": _positions(groups, padding)}
    for name, rule in rules.items():
        present = [prompt.forward_kwargs[name] for prompt in prompts if name in prompt.forward_kwargs]
        if present and rule.kind is JoinKind.TOKENS:
            kwargs[name] = _per_token(name, groups, rule, padding)
        elif present:
            # One row of the batch has all pictures: what counts prompts on axis 0 counts pictures on axis 1.
            kwargs[name] = pad_and_cat(present, rule, axis=1 if rule.kind is JoinKind.SAMPLES else 0)
    return PackedPiece(
        input_ids=torch.cat([*ids, torch.full((padding,), pad_token_id)])[None],
        layout=torch.tensor(layout)[None, None, None],
        forward_kwargs=kwargs,
        prompts=tuple(prompts),
    )


def _positions(groups: Sequence[Sequence[_Row]], padding: int) -> torch.Tensor:
    """[1, T] counted from 0 for each prompt, and on from it for each of its completions."""
    parts: list[torch.Tensor] = []
    for rows in groups:
        length = rows[0].length
        parts += [torch.arange(length), *(torch.arange(length, length + len(row.ids)) for row in rows)]
    return torch.cat([*parts, torch.zeros(padding, dtype=torch.long)])[None]


def _per_token(name: str, groups: Sequence[Sequence[_Row]], rule: Join, padding: int) -> torch.Tensor:
    """A per-token kwarg of the packed row, with a batch axis of 1 before the token axis."""
    parts: list[torch.Tensor] = []
    for rows in groups:
        for i, row in enumerate(rows):
            part = row.whole.forward_kwargs.get(name)
            if part is None:
                raise ValueError(f"one prompt of the batch lacks the per-token input {name}; encode all by one adapter")
            part, length = part.movedim(rule.token_axis, -1), row.length + len(row.ids)
            end = min(length, part.shape[-1])  # its last id, which is left out, may be one that a turn added
            part = torch.cat([part[..., :end], continuation(part, rule, length - end)], dim=-1)
            parts.append(part if i == 0 else part[..., row.length :])
    parts.append(parts[0].new_full((*parts[0].shape[:-1], padding), rule.pad))
    return torch.cat(parts, dim=-1).movedim(-1, rule.token_axis).unsqueeze(rule.token_axis)
