"""Prompts and completions -> one row, in which each prompt stands once, followed by all of its completions.

    prompt A | completion A1 | completion A2 | prompt B | completion B1 | ...

A token attends to its own prompt and to its own completion, nothing else; `PackedPiece.layout` says where they are, and
positions of every completion go on from its prompt. No prompt is there twice, and nothing is padded but the end of the
row, on request.
`vlmroll_processors.collate` makes the padded counterpart.

Shapes: B rows of the batch, C longest completion, N completion tokens, T tokens of a packed row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlmroll_processors.collate import alike, continuation, pad, pad_and_cat, rules_of
from vlmroll_processors.types import Join, JoinKind, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPiece:
    """A packed row, which the model takes in one forward pass.

    Attributes:
        input_ids: [1, T].
        layout: [1, 1, 1, K] whole numbers: for each prompt its length, the number of its completions, and the length of
            each. It goes through the model in the place of an attention mask.
        forward_kwargs: the model's other inputs, `position_ids` always among them.
        prompts: the prompts in their order, each once.
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
        pieces: one, or more where the family would mix up prompts with different numbers of pictures.
        predictors: [N] for each completion token, row by row, which token of all pieces, one after the other, predicts
            it: the last one of the prompt predicts the first one.
        num_tokens: of all pieces, padding left out.
    """

    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
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
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> PackedBatch:
    """Put prompts and their completions into one row.

    Args:
        prompts: B prompts; the siblings of a group bring the same object several times.
        completions: the sampled ids of each row, at least one.
        pad_token_id: the id under padding.
        pad_to_multiple_of: make T a multiple of it, by padding at its end.

    Raises:
        ValueError: no prompts, or not one completion, with a token, for each.

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
    rules = rules_of(prompts)
    pieces: list[PackedPiece] = []
    predictors: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    start = padded = 0
    for rows in _apart(prompts, rules):
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(id(prompts[row]), []).append(row)
        for members in groups.values():
            start += prompts[members[0]].num_tokens
            last = start - 1
            for row in members:
                length = len(tails[row]) - 1
                predictors[row] = torch.cat([torch.tensor([last]), torch.arange(start, start + length)])
                start += length
        shared = [(prompts[members[0]], [tails[row][:-1] for row in members]) for members in groups.values()]
        padding = -start % (pad_to_multiple_of or 1)
        start, padded = start + padding, padded + padding
        pieces.append(_piece(shared, rules, [pad_token_id] * padding))
    return PackedBatch(
        completion_ids=pad(tails, pad_token_id),
        completion_mask=pad([torch.ones_like(tail) for tail in tails], 0),
        pieces=tuple(pieces),
        predictors=torch.cat(predictors),
        num_tokens=start - padded,
    )


def _apart(prompts: Sequence[Prompt], rules: Mapping[str, Join]) -> list[list[int]]:
    """The places of prompts that go into one piece.

    What is repeated for every token points at the prompt's own pictures, so that others must not stand beside them.
    """
    if not any(rule.completion == "repeat" for rule in rules.values()):
        return alike(prompts)
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(id(prompt), []).append(i)
    return list(groups.values())


Group = tuple[Prompt, list[torch.Tensor]]


def _piece(groups: Sequence[Group], rules: Mapping[str, Join], padding: list[int]) -> PackedPiece:
    """One packed row; padding stands at its end like a prompt without completions."""
    layout = [n for prompt, tails in groups for n in (prompt.num_tokens, len(tails), *map(len, tails))]
    layout += [len(padding), 0] if padding else []
    ids = [part for prompt, tails in groups for part in (torch.tensor(prompt.prompt_ids), *tails)]
    kwargs = {"position_ids": _positions(groups, len(padding))}
    for name, rule in rules.items():
        parts = [prompt.forward_kwargs.get(name) for prompt, _ in groups]
        if rule.kind is JoinKind.TOKENS and any(part is not None for part in parts):
            kwargs[name] = _per_token(name, groups, rule, len(padding))
        elif present := [part for part in parts if part is not None]:
            # One row of the batch has all pictures: what counts prompts on axis 0 counts pictures on axis 1.
            kwargs[name] = pad_and_cat(present, rule, axis=1 if rule.kind is JoinKind.SAMPLES else 0)
    return PackedPiece(
        input_ids=torch.cat([*ids, torch.tensor(padding, dtype=torch.long)])[None],
        layout=torch.tensor(layout)[None, None, None],
        forward_kwargs=kwargs,
        prompts=tuple(prompt for prompt, _ in groups),
    )


def _positions(groups: Sequence[Group], padding: int) -> torch.Tensor:
    """[1, T] counted from 0 for each prompt, and on from it for each of its completions."""
    parts: list[torch.Tensor] = []
    for prompt, tails in groups:
        length = prompt.num_tokens
        parts += [torch.arange(length), *(torch.arange(length, length + len(tail)) for tail in tails)]
    return torch.cat([*parts, torch.zeros(padding, dtype=torch.long)])[None]


def _per_token(name: str, groups: Sequence[Group], rule: Join, padding: int) -> torch.Tensor:
    """A per-token kwarg of the packed row, with a batch axis of 1 before the token axis."""
    parts: list[torch.Tensor] = []
    for prompt, tails in groups:
        part = prompt.forward_kwargs.get(name)
        if part is None:
            raise ValueError(f"one prompt of the batch lacks the per-token input {name}; encode all by one adapter")
        part = part.movedim(rule.token_axis, -1)
        parts += [part, *(continuation(part, rule, len(tail)) for tail in tails)]
    parts.append(parts[0].new_full((*parts[0].shape[:-1], padding), rule.pad))
    return torch.cat(parts, dim=-1).movedim(-1, rule.token_axis).unsqueeze(rule.token_axis)
