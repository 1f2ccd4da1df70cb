"""What must be true of an adapter together with a model. Each check returns what is wrong, or nothing."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.collate import PaddedBatch, Piece, collate
from vlmroll_processors.conformance.checks import Problems, describe
from vlmroll_processors.conformance.probes import Probe, processor_output

NEW_TOKENS = 3


def _logits(model: Any, batch: PaddedBatch) -> list[torch.Tensor]:
    """[C + 1, V] of the last token of each row's prompt and of the C tokens of its own completion."""
    found: dict[int, torch.Tensor] = {}
    keep = batch.completion_mask.shape[1] + 1
    options = {"logits_to_keep": keep} if "logits_to_keep" in signature(model.forward).parameters else {}
    for piece in batch.pieces:
        inputs = batch.model_inputs(piece, dtype=model.dtype)
        with torch.no_grad():
            logits = model(**_on_device(inputs, model), use_cache=False, **options).logits[:, -keep:].float().cpu()
        lengths = batch.completion_mask[list(piece.rows)].sum(1).tolist()
        found |= {row: part[: n + 1] for row, part, n in zip(piece.rows, logits, lengths, strict=True)}
    return [found[row] for row in range(len(batch.input_ids))]


def _on_device(inputs: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _completions(adapter: FamilyAdapter, count: int) -> list[list[int]]:
    """Made-up completions of different lengths, of ids that may be sampled."""
    usable = [i for i in range(len(adapter.tokenizer)) if i not in adapter.vision_ids]
    return [[usable[(7 * i + 3 * j) % len(usable)] for j in range(2 + i)] for i in range(count)]


def _off(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> float:
    """The largest difference in units of what is tolerated."""
    scale = max(1.0, float(theirs.abs().max()))
    return float((ours - theirs).abs().max()) / (tolerance * scale)


def batch_changes_nothing(adapter: FamilyAdapter, probes: Sequence[Probe], model: Any, tolerance: float) -> Problems:
    """A row's logits are the same alone and in a batch with any others."""
    prompts = [probe.prompt for probe in probes]
    completions = _completions(adapter, len(prompts))
    together = _logits(model, collate(prompts, completions, pad_token_id=adapter.pad_token_id))
    for prompt, completion, row in zip(prompts, completions, together, strict=True):
        (alone,) = _logits(model, collate([prompt], [completion], pad_token_id=adapter.pad_token_id))
        if not (off := _off(row, alone, tolerance)) <= 1:
            yield f"logits of a row with {describe(prompt)} move by {off * tolerance:.1e} in a batch"


def as_generated(adapter: FamilyAdapter, probes: Sequence[Probe], model: Any, tolerance: float) -> Problems:
    """Scoring prompt and completion at once gives the logits that the model's own `generate` had at each token."""
    for probe in probes:
        prompt = probe.prompt
        # All that the model takes, also what the family drops: that may be a fault.
        takes = signature(model.forward).parameters.keys() - {"labels"}
        output = processor_output(adapter, [prompt])
        inputs = {name: output[name] for name in output if name in takes or name not in adapter.family.drop}
        output = model.generate(**_on_device(inputs, model), generation_config=_greedy(model, adapter))
        theirs = torch.cat([step.float().cpu() for step in output.logits])
        completion = output.sequences[0, -NEW_TOKENS:].tolist()
        (row,) = _logits(model, collate([prompt], [completion], pad_token_id=adapter.pad_token_id))
        if not (off := _off(row[:-1], theirs, tolerance)) <= 1:
            yield f"logits of a row with {describe(prompt)} differ by {off * tolerance:.1e} from generate's"


def _greedy(model: Any, adapter: FamilyAdapter) -> Any:
    options = copy.deepcopy(model.generation_config)
    options.update(
        max_length=None,
        max_new_tokens=NEW_TOKENS,
        min_length=None,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        suppress_tokens=sorted(adapter.vision_ids),
        output_logits=True,
        return_dict_in_generate=True,
    )
    return options


def pixels_matter(adapter: FamilyAdapter, probes: Sequence[Probe], model: Any, tolerance: float) -> Problems:
    """Other pixels give other logits: the pictures reach the model."""
    for probe in (probe for probe in probes if probe.texts):
        batch = collate([probe.prompt], pad_token_id=adapter.pad_token_id)
        kwargs = {
            name: tensor.flip(-1) if tensor.is_floating_point() else tensor
            for name, tensor in batch.forward_kwargs.items()
        }
        other = replace(batch, pieces=(Piece(rows=(0,), forward_kwargs=kwargs),))
        if not _off(_logits(model, other)[0], _logits(model, batch)[0], tolerance) > 1:
            yield f"the pixels of a row with {describe(probe.prompt)} change nothing"


def config_ids_are_banned(adapter: FamilyAdapter, probes: Sequence[Probe], model: Any, tolerance: float) -> Problems:
    """The ids that the model's config names for pictures and videos are among the vision ids."""
    for name, value in _picture_ids(model.config.to_dict()):
        if 0 <= value < len(adapter.tokenizer) and value not in adapter.vision_ids:
            yield f"{name}={value} ({adapter.tokenizer.convert_ids_to_tokens(value)}) may be sampled"


def _picture_ids(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    words = ("image", "video", "vision", "boi", "eoi")
    for name, value in config.items():
        if isinstance(value, int) and name.endswith(("token_id", "token_index")) and name.startswith(words):
            yield name, value
