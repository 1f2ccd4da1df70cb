"""Rollouts -> the tensors of a micro-batch, padded or packed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from vlmroll.types import Batch, Rollout
from vlmroll_processors import PackedBatch, PaddedBatch, collate, pack
from vlmroll_processors.collate import pad

AnyBatch = TypeVar("AnyBatch", PaddedBatch, PackedBatch)


def to_device(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    """The batch on a device; layouts of packed rows, which are read on the CPU, stay there."""

    def moved(kwargs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in kwargs.items()}

    if isinstance(batch, PackedBatch):
        return replace(
            batch,
            completion_ids=batch.completion_ids.to(device),
            completion_mask=batch.completion_mask.to(device),
            scored_mask=batch.scored_mask.to(device),
            predictors=batch.predictors.to(device),
            pieces=tuple(
                replace(piece, input_ids=piece.input_ids.to(device), forward_kwargs=moved(piece.forward_kwargs))
                for piece in batch.pieces
            ),
        )
    return replace(
        batch,
        input_ids=batch.input_ids.to(device),
        attention_mask=batch.attention_mask.to(device),
        completion_mask=batch.completion_mask.to(device),
        scored_mask=batch.scored_mask.to(device),
        pieces=tuple(replace(piece, forward_kwargs=moved(piece.forward_kwargs)) for piece in batch.pieces),
    )


def join_rollouts(
    rollouts: Sequence[Rollout],
    *,
    pad_token_id: int,
    device: torch.device | str,
    pad_to_multiple_of: int | None = None,
    packed: bool = False,
) -> PaddedBatch | PackedBatch:
    """The ids, masks and forward kwargs of some rollouts on a device.

    Args:
        packed: in one row, each prompt once.
    """
    prompts = [rollout.prompt for rollout in rollouts]
    completions = [rollout.completion.completion_ids for rollout in rollouts]
    turns = [rollout.completion.turns for rollout in rollouts]
    options: dict[str, Any] = {"pad_token_id": pad_token_id, "pad_to_multiple_of": pad_to_multiple_of}
    if any(its is not None for its in turns):
        options["continuations"] = [None if its is None else its.continuation for its in turns]
        options["sampled"] = [rollout.completion.sampled for rollout in rollouts]
    if packed:
        return to_device(pack(prompts, completions, **options), device)
    return to_device(collate(prompts, completions, **options), device)


def make_batch(
    rollouts: Sequence[Rollout],
    *,
    pad_token_id: int,
    device: torch.device | str,
    pad_to_multiple_of: int | None = None,
    packed: bool = False,
) -> Batch:
    """The tensors of one micro-batch on a device; see `join_rollouts`.

    Raises:
        ValueError: some of the rollouts have scores that the others lack.
    """
    inputs = join_rollouts(
        rollouts, pad_token_id=pad_token_id, device=device, pad_to_multiple_of=pad_to_multiple_of, packed=packed
    )
    width = inputs.completion_mask.shape[1]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        values = [getattr(rollout, name) for rollout in rollouts]
        if all(value is None for value in values):
            return None
        if any(value is None for value in values):
            raise ValueError(f"some rollouts of the batch have {name} and some have none; score all or none of them")
        return pad([torch.tensor(value, dtype=dtype) for value in values], 0, to=width).to(device)

    mask = column("counted", torch.long)
    assert mask is not None
    return Batch(
        inputs=inputs,
        loss_mask=mask,
        entropy_mask=column("entropy_mask", torch.long),
        advantages=torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32, device=device),
        loss_weights=torch.tensor([rollout.loss_weight for rollout in rollouts], dtype=torch.float32, device=device),
        old_logprobs=column("old_logprobs", torch.float32),
        ref_logprobs=column("ref_logprobs", torch.float32),
        mismatch=column("mismatch", torch.float32),
    )
