"""A prompt, a sampled turn and the text behind it -> the prompt of the next turn. Nothing is tokenised again."""

from collections.abc import Sequence
from typing import Any

import torch

from vlmroll_processors.assembly import joined, media_of, more_of, placed, tokens_of, units_of
from vlmroll_processors.collate import continuation
from vlmroll_processors.families.base import Family, Whole
from vlmroll_processors.images import Picture
from vlmroll_processors.media import KINDS
from vlmroll_processors.reading import Unit
from vlmroll_processors.types import JoinKind, Prompt
from vlmroll_processors.videos import Video


def last_token(tokenizer: Any, ids: Sequence[int]) -> str:
    """The added token, such as a stop token, that the ids end with; empty if they end with none."""
    return str(tokenizer.added_tokens_decoder.get(ids[-1], "")) if ids else ""


def extend(
    family: Family,
    processor: Any,
    config: Any,
    prompt: Prompt,
    completion_ids: Sequence[int],
    text: str,
    units: Sequence[Unit],
    *,
    where: str,
) -> Prompt:
    """The prompt with a sampled turn, and what follows it, behind it.

    The first P values of every per-token kwarg are the prompt's, except where a later picture matters to an earlier
    token: Llama 3.2 Vision's mask gains the new pictures.

    Args:
        config: the model's config, or None; few families need it.
        prompt: what the turn was sampled from.
        completion_ids: the sampled ids, which stay as they are.
        text: what the chat template writes behind them, with one slot for each new medium.
        units: the new media in slot order.
        where: names the new messages in error messages.

    Raises:
        ValueError: slots and media, or features and placeholder tokens, do not match; or there are no tokens.
    """
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    before = last_token(tokenizer, completion_ids)
    tokens = tokens_of(family, processor, text, units, special=False, before=before, where=where)
    start = prompt.num_tokens + len(completion_ids)
    added = [[start + place for place in places] for places in tokens.places]
    old = _old_media(family, tokenizer, prompt)
    media = [*(medium for medium, _ in old), *media_of(units)]
    places = [*(places for _, places in old), *added]
    whole = Whole(
        processor=processor,
        config=config,
        num_tokens=start + len(tokens.prompt_ids),
        places=places,
        media=[*prompt.unit_kwargs(), *(unit.features.kwargs for unit in units)],
    )
    kwargs = _media_kwargs(family, prompt, units)
    kwargs |= _continued(family, prompt, whole.num_tokens, media[len(old) :], added)
    kwargs |= more_of(family, whole, where=where)
    return Prompt(
        prompt_ids=(*prompt.prompt_ids, *completion_ids, *tokens.prompt_ids),
        engine_ids=(*prompt.engine_ids, *completion_ids, *tokens.engine_ids),
        text=prompt.text + tokenizer.decode(list(completion_ids)) + text,
        **placed(media, places),
        units=(*prompt.units, *units_of(family.join, units, tokens.counts)),
        forward_kwargs=kwargs,
        join=family.join,
        batch_key=len(media) if family.alike else 0,
    )


def _old_media(family: Family, tokenizer: Any, prompt: Prompt) -> list[tuple[Picture | Video, list[int]]]:
    """The prompt's pictures and videos in the order of their slots, each with the places of its features."""
    features = {tokenizer.convert_tokens_to_ids(token) for kind in KINDS if (token := family.feature_of(kind))}
    media: list[Picture | Video] = [*prompt.images, *prompt.videos]
    pairs = zip(media, (*prompt.image_spans, *prompt.video_spans), strict=True)
    return [
        (medium, [i for i in range(span.offset, span.offset + span.length) if prompt.prompt_ids[i] in features])
        for medium, span in sorted(pairs, key=lambda pair: pair[1].offset)
    ]


def _media_kwargs(family: Family, prompt: Prompt, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
    """The kwargs of all pictures and videos; without new ones the prompt's own tensors."""
    own = {name: part for name, part in prompt.forward_kwargs.items() if family.join[name].kind is not JoinKind.TOKENS}
    return joined(family.join, [own, *(unit.features.kwargs for unit in units)]) if units else own


def _continued(
    family: Family,
    prompt: Prompt,
    num_tokens: int,
    media: Sequence[Picture | Video],
    places: Sequence[Sequence[int]],
) -> dict[str, torch.Tensor]:
    """Per-token kwargs that go on as over a completion, but for the features of new media where they are marked."""
    kwargs: dict[str, torch.Tensor] = {}
    for name, rule in family.join.items():
        if not rule.prompt:
            continue
        part = prompt.forward_kwargs[name]
        kwargs[name] = torch.cat([part, continuation(part, rule, num_tokens - prompt.num_tokens)])
        for medium, found in zip(media, places, strict=True) if rule.prompt == "marks" else ():
            kwargs[name][list(found)] = 1 + KINDS.index(medium.kind)  # pyright: ignore
    return kwargs
