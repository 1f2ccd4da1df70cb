"""What must be true of an adapter without a model. Each check returns what is wrong, or nothing."""

from collections.abc import Iterator, Sequence

import torch

from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.collate import PaddedBatch, alike, collate
from vlmroll_processors.conformance.probes import Probe, processor_output
from vlmroll_processors.families.generic import VISION_WORDS
from vlmroll_processors.types import JoinKind, Prompt

Problems = Iterator[str]


def batches(probes: Sequence[Probe]) -> list[list[Prompt]]:
    """The prompts, in the batches that they may form."""
    prompts = [probe.prompt for probe in probes]
    return [[prompts[i] for i in places] for places in alike(prompts)]


def describe(prompt: Prompt) -> str:
    """What a prompt shows."""
    return f"{len(prompt.images)} pictures" + (f" and {len(prompt.videos)} videos" if prompt.videos else "")


def joined_equals_processor(adapter: FamilyAdapter, probes: Sequence[Probe]) -> Problems:
    """Prompts encoded alone and then joined equal the processor on the whole batch, bit for bit."""
    for prompts in batches(probes):
        ours = collate(prompts, pad_token_id=adapter.pad_token_id).model_inputs()
        theirs = processor_output(adapter, prompts)
        made_here = {"position_ids"} - theirs.keys()
        for name in sorted(theirs.keys() - set(adapter.family.drop) | ours.keys() - made_here):
            if name not in ours:
                yield f"{name} of the processor is not passed on"
            elif name not in theirs:
                yield f"{name} is not made by the processor"
            elif ours[name].shape != theirs[name].shape:
                yield f"{name} has the shape {list(ours[name].shape)}, the processor's {list(theirs[name].shape)}"
            elif not torch.equal(ours[name], theirs[name].to(ours[name].dtype)):
                yield f"{name} has other values than the processor's"


def split_gives_back(adapter: FamilyAdapter, probes: Sequence[Probe]) -> Problems:
    """A joined batch holds each prompt's own tensors unchanged, in whatever order the prompts come."""
    for prompts in batches(probes):
        for order in (prompts, prompts[::-1]):
            batch = collate(order, [[adapter.pad_token_id] * (i + 1) for i in range(len(order))], pad_token_id=0)
            for i, prompt in enumerate(order):
                for name, tensor in prompt.forward_kwargs.items():
                    if not torch.equal(_part(batch, order, i, name), tensor):
                        yield f"{name} of a prompt with {describe(prompt)} changes in a batch"


def _part(batch: PaddedBatch, prompts: Sequence[Prompt], place: int, name: str) -> torch.Tensor:
    """One prompt's part of a kwarg of a batch."""
    prompt, rule, tensor = prompts[place], prompts[place].join[name], batch.forward_kwargs[name]
    own = prompt.forward_kwargs[name].shape
    if rule.kind is JoinKind.TOKENS:
        end = tensor.shape[rule.token_axis + 1] - batch.completion_mask.shape[1]
        row = tensor.movedim(rule.token_axis, 0)[place].movedim(rule.token_axis, 0)
        return row[end - prompt.num_tokens : end].movedim(0, rule.token_axis)
    before = [other.forward_kwargs[name].shape[0] for other in prompts[:place] if name in other.forward_kwargs]
    start = place if rule.kind is JoinKind.SAMPLES else sum(before)
    return tensor[(slice(start, start + own[0]), *(slice(size) for size in own[1:]))]


def order_changes_nothing(adapter: FamilyAdapter, probes: Sequence[Probe]) -> Problems:
    """Rows encoded together, in reverse, give what each gives alone."""
    for probe, prompt in zip(probes, adapter.encode([probe.row for probe in probes[::-1]])[::-1], strict=True):
        alone = probe.prompt
        if (prompt.prompt_ids, prompt.engine_ids) != (alone.prompt_ids, alone.engine_ids):
            yield f"the ids of a prompt with {describe(alone)} depend on the rows around it"
        for name, tensor in alone.forward_kwargs.items():
            if not torch.equal(prompt.forward_kwargs[name], tensor):
                yield f"{name} of a prompt with {describe(alone)} depends on the rows around it"


def spans_cover_features(adapter: FamilyAdapter, probes: Sequence[Probe]) -> Problems:
    """Each span runs from the first to the last feature of its picture, found anew by characters."""
    for probe in probes:
        ids, places = _features_by_characters(adapter, probe)
        if tuple(ids) != probe.prompt.prompt_ids:
            yield f"prompt_ids of a prompt with {describe(probe.prompt)} are not those of its expanded text"
        for kind, spans in (("image", probe.prompt.image_spans), ("video", probe.prompt.video_spans)):
            found = [place for place, medium in zip(places, probe.media, strict=True) if medium == kind]
            wanted = [(place[0], place[-1] + 1 - place[0]) for place in found if place]
            if (given := [(span.offset, span.length) for span in spans]) != wanted:
                yield f"{kind} spans {given}, expected {wanted}"
        features = {adapter.tokenizer.convert_tokens_to_ids(adapter.family.feature_of(kind)) for kind in probe.media}
        held = sum(token in features for token in probe.prompt.prompt_ids)
        if held != (brought := sum(len(place) for place in places)):
            yield f"{held} placeholder tokens for {brought} features"


def _features_by_characters(adapter: FamilyAdapter, probe: Probe) -> tuple[list[int], list[list[int]]]:
    """Ids of the expanded prompt, and where among them the features of each medium stand."""
    family, processor, tokenizer = adapter.family, adapter.processor, adapter.tokenizer
    text, bounds = "", list[tuple[int, int]]()
    for piece, replaced in _expand(adapter, family.wrap(processor, probe.prompt.text), probe):
        start = len(text)
        text = family.tidy(processor, text + piece) if probe.texts else text + piece
        if replaced:
            bounds.append((start, len(text)))
    special = tokenizer(text)["input_ids"] == list(probe.prompt.prompt_ids)
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    tokens = list(zip(found["input_ids"], found["offset_mapping"], strict=True))
    places: list[list[int]] = []
    for (start, end), kind in zip(bounds, probe.media, strict=True):
        feature = tokenizer.convert_tokens_to_ids(family.feature_of(kind))
        inside = [
            i for i, (token, (first, last)) in enumerate(tokens) if token == feature and start < last and first < end
        ]
        places.append(inside)
    return found["input_ids"], places


def _expand(adapter: FamilyAdapter, text: str, probe: Probe) -> Iterator[tuple[str, bool]]:
    """The pieces of the text with its slots replaced; True for what came in a slot's place."""
    for kind, replacement in zip(probe.media, probe.texts, strict=True):
        before, _, text = text.partition(adapter.family.slot_of(kind))
        yield before, False
        yield replacement, True
    yield text, False


def engine_ids_expand(adapter: FamilyAdapter, probes: Sequence[Probe]) -> Problems:
    """`engine_ids` hold one slot for each medium, and give `prompt_ids` when each slot gives way to it."""
    family, tokenizer = adapter.family, adapter.tokenizer
    for probe in probes:
        prompt = probe.prompt
        for kind in dict.fromkeys(("image", *probe.media) if family.slot else ()):
            slots = prompt.engine_ids.count(tokenizer.convert_tokens_to_ids(family.slot_of(kind)))
            if slots != (wanted := probe.media.count(kind)):
                yield f"{slots} {kind} slots in engine_ids for {wanted}"
        if tuple(_replaced(adapter, probe)) == prompt.prompt_ids:
            continue
        # What a picture brings may be read together with the text beside it, such as line breaks.
        text = tokenizer.decode(list(prompt.engine_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = "".join(piece for piece, _ in _expand(adapter, text, probe))
        text = family.tidy(adapter.processor, text) if probe.texts else text
        if tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) != prompt.prompt_ids:
            yield f"engine_ids with {describe(prompt)} expand to other ids than prompt_ids"


def _replaced(adapter: FamilyAdapter, probe: Probe) -> Iterator[int]:
    """`engine_ids` with each slot's id replaced by the ids of what its medium brings."""
    slots = {adapter.tokenizer.convert_tokens_to_ids(adapter.family.slot_of(kind)) for kind in probe.media}
    texts = iter(probe.texts)
    for token in probe.prompt.engine_ids:
        if token in slots and (text := next(texts, None)) is not None:
            yield from adapter.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            yield token


def vision_ids_are_complete(adapter: FamilyAdapter, probes: Sequence[Probe]) -> Problems:
    """Every special token that stands for pictures is banned: those that appear with pictures, and those so named."""
    if not adapter.family.slot:
        return
    added = {i: str(token) for i, token in adapter.tokenizer.added_tokens_decoder.items()}
    wanted = {i for i, token in added.items() if VISION_WORDS.fullmatch(token)}
    for probe in probes:
        for text in probe.texts:
            ids = adapter.tokenizer(text, add_special_tokens=False)["input_ids"]
            wanted.update(i for i in ids if i in added)
    wanted.add(adapter.tokenizer.convert_tokens_to_ids(adapter.family.slot))
    if missing := sorted(added[i] for i in wanted - adapter.vision_ids):
        yield f"may be sampled: {', '.join(missing)}"
