"""A rendered text and what its pictures bring -> one `Prompt`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmroll_processors.collate import pad_and_cat
from vlmroll_processors.families.base import Family, Tensors, Whole
from vlmroll_processors.images import Picture
from vlmroll_processors.media import KINDS, NOUNS
from vlmroll_processors.reading import Unit
from vlmroll_processors.types import JOINED_ON, ImageSpan, Join, MediaUnit, Prompt
from vlmroll_processors.videos import Video


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A text in tokens.

    Attributes:
        engine_ids, prompt_ids: with one placeholder for each medium, and with all of its features.
        counts: how many features each medium has.
        places: where they stand in `prompt_ids`.
    """

    engine_ids: list[int]
    prompt_ids: list[int]
    counts: list[int]
    places: list[list[int]]


def assemble(
    family: Family, processor: Any, config: Any, text: str, units: Sequence[Unit], *, special: bool, where: str
) -> Prompt:
    """Tokenise the rendered text, with slots and with features, and join what the media bring.

    Args:
        config: the model's config, or None; few families need it.
        text: the rendered prompt, with one slot for each medium.
        units: the media in slot order.
        special: whether the tokenizer adds its special tokens.
        where: names the row and the column in error messages.

    Raises:
        ValueError: slots and media, or features and placeholder tokens, do not match; or there are no tokens.
    """
    media = media_of(units)
    tokens = tokens_of(family, processor, family.wrap(processor, text), units, special=special, where=where)
    kwargs = joined(family.join, [unit.features.kwargs for unit in units])
    kwargs |= _marks(family.join, len(tokens.prompt_ids), [m.kind for m in media], tokens.places)
    whole = Whole(
        processor=processor,
        config=config,
        num_tokens=len(tokens.prompt_ids),
        places=tokens.places,
        media=[unit.features.kwargs for unit in units],
    )
    kwargs |= more_of(family, whole, where=where)
    return Prompt(
        prompt_ids=tuple(tokens.prompt_ids),
        engine_ids=tuple(tokens.engine_ids),
        text=text,
        **placed(media, tokens.places),
        units=units_of(family.join, units, tokens.counts),
        forward_kwargs=kwargs,
        join=family.join,
        batch_key=len(media) if family.alike else 0,
    )


def media_of(units: Sequence[Unit]) -> list[Picture | Video]:
    """The media of all units, in slot order."""
    return [medium for unit in units for medium in unit.media]


def tokens_of(
    family: Family, processor: Any, text: str, units: Sequence[Unit], *, special: bool, before: str = "", where: str
) -> Tokens:
    """The ids of a text, once with slots and once with features.

    Args:
        before: a special token that stands before the text already, which decides how the text's first word is read.
        special, where: as in `assemble`.

    Raises:
        ValueError: as `assemble`.
    """
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    features = [token for kind in KINDS if (token := family.feature_of(kind))]
    first = [tokenizer.convert_tokens_to_ids(before)] if before else []

    def ids_of(piece: str) -> list[int]:
        try:
            ids = _tokenise(tokenizer, before + piece, features, special=special)
            if ids[: len(first)] == first:
                return ids[len(first) :]
            return _tokenise(tokenizer, piece, features, special=special)
        except TypeError as error:  # the tokenizer's word for text that is not valid Unicode
            raise ValueError(f"{where}: the text cannot be tokenised: {error}") from error

    media = media_of(units)
    texts = [piece for unit in units for piece in unit.features.texts]
    engine_ids = ids_of(text)
    expanded = _expand(family, text, media, texts, where=where)
    prompt_ids = ids_of(family.tidy(processor, expanded)) if media else engine_ids
    if not prompt_ids:
        raise ValueError(f"{where}: it renders to no tokens; give a prompt that is not empty")
    counts = [piece.count(family.feature_of(medium.kind)) for medium, piece in zip(media, texts, strict=True)]
    places = _places(family, tokenizer, prompt_ids, counts, where=where)
    return Tokens(engine_ids=engine_ids, prompt_ids=prompt_ids, counts=counts, places=places)


def placed(media: Sequence[Picture | Video], places: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A prompt's pictures and videos with their spans."""
    spans = [ImageSpan(offset=found[0], length=found[-1] + 1 - found[0]) for found in places]
    pairs = list(zip(media, spans, strict=True))
    return {
        "images": tuple(medium for medium in media if isinstance(medium, Picture)),
        "image_spans": tuple(span for medium, span in pairs if isinstance(medium, Picture)),
        "videos": tuple(medium for medium in media if isinstance(medium, Video)),
        "video_spans": tuple(span for medium, span in pairs if isinstance(medium, Video)),
    }


def units_of(join: Mapping[str, Join], units: Sequence[Unit], counts: Sequence[int]) -> tuple[MediaUnit, ...]:
    """The share of each unit, from the number of features of each medium."""
    left = iter(counts)
    return tuple(
        MediaUnit(
            num_features=sum(next(left) for _ in unit.media),
            rows={name: part.shape[JOINED_ON[join[name].kind]] for name, part in unit.features.kwargs.items()},
        )
        for unit in units
    )


def _expand(family: Family, text: str, media: Sequence[Picture | Video], texts: Sequence[str], *, where: str) -> str:
    """The text with each slot replaced by what its medium brings."""
    slots = {slot: kind for kind in KINDS if (slot := family.slot_of(kind))}
    if not slots:
        return text
    pieces = re.split(f"({'|'.join(map(re.escape, slots))})", text)
    found = [slots[piece] for piece in pieces if piece in slots]
    wanted = [medium.kind for medium in media]
    if found != wanted:
        kind = next((k for k in KINDS if found.count(k) != wanted.count(k)), "image")
        noun = "picture" if kind == "image" else kind
        raise ValueError(
            f"{where}: the chat template rendered {found.count(kind)} {noun} slots for "
            f"{wanted.count(kind)} {NOUNS[kind]}; put {NOUNS[kind]} only into messages whose role the template gives "
            f"{NOUNS[kind]} to"
        )
    replacement = iter(texts)
    return "".join(next(replacement) if piece in slots else piece for piece in pieces if piece)


def _tokenise(tokenizer: Any, text: str, features: Sequence[str], *, special: bool) -> list[int]:
    """The ids of a text, with each run of a feature token read once: runs have thousands, and tokenisers are slow.

    Feature tokens are special: what stands around a run is read alike, however long it is.
    """
    if not features:
        return tokenizer(text, add_special_tokens=special)["input_ids"]
    runs: list[int] = []

    def shorten(run: re.Match[str]) -> str:
        token = next(token for token in features if run[0].startswith(token))
        runs.append(len(run[0]) // len(token))
        return token

    short = re.sub("|".join(f"(?:{re.escape(token)})+" for token in features), shorten, text)
    ids: list[int] = tokenizer(short, add_special_tokens=special)["input_ids"]
    marks = {tokenizer.convert_tokens_to_ids(token) for token in features}
    if sum(i in marks for i in ids) != len(runs):  # a tokenizer that reads a feature token as text
        return tokenizer(text, add_special_tokens=special)["input_ids"]
    lengths = iter(runs)
    return [token for i in ids for token in (i,) * (next(lengths) if i in marks else 1)]


def _places(
    family: Family, tokenizer: Any, ids: Sequence[int], counts: Sequence[int], *, where: str
) -> list[list[int]]:
    """The positions of each medium's features among the prompt's tokens."""
    features = {tokenizer.convert_tokens_to_ids(token) for kind in KINDS if (token := family.feature_of(kind))}
    found = [i for i, token in enumerate(ids) if token in features]
    if len(found) != sum(counts) or 0 in counts:
        raise ValueError(
            f"{where}: it holds {len(found)} placeholder tokens for {sum(counts)} features of "
            f"{len(counts)} pictures; the tokenizer and the processor do not belong together"
        )
    ends = torch.tensor(counts, dtype=torch.long).cumsum(0).tolist()
    return [found[end - count : end] for end, count in zip(ends, counts, strict=True)]


def more_of(family: Family, whole: Whole, *, where: str) -> Tensors:
    """The family's kwargs that depend on the whole prompt."""
    try:
        return family.more(whole)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def joined(join: Mapping[str, Join], parts: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """The kwargs of the media of one prompt, one after the other."""
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: [part[name] for part in parts if name in part] for name in names}
    # One medium's tensors are shared with the other prompts that show it alone.
    return {
        name: _whole(tensors[0]) if len(tensors) == 1 else pad_and_cat(tensors, join[name], JOINED_ON[join[name].kind])
        for name, tensors in found.items()
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it is part of another prompt's: it would keep that alive, and be pickled with all of it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _marks(
    join: Mapping[str, Join], num_tokens: int, kinds: Sequence[str], places: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Per-token kwargs whose value follows from the kind of each token alone."""
    marks = torch.zeros(num_tokens, dtype=torch.long)
    for kind, found in zip(kinds, places, strict=True):
        marks[list(found)] = 1 + KINDS.index(kind)  # pyright: ignore
    return {
        name: marks if rule.prompt == "marks" else torch.zeros_like(marks) for name, rule in join.items() if rule.prompt
    }
