"""Dataset rows -> `Prompt` values, for any family.

`load_adapter` picks the family of a processor; `encode` does the rest: rows become chats with their pictures in their
slots, the chat template renders them, the tokenizer reads the text with one placeholder for each picture
(`engine_ids`), and the text in which each placeholder has given way to what the picture brings (`prompt_ids`).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from PIL import Image

from vlmroll_processors.assembly import assemble
from vlmroll_processors.extension import extend, last_token
from vlmroll_processors.families import Family
from vlmroll_processors.families.base import Sized
from vlmroll_processors.images import Picture
from vlmroll_processors.media import Medium
from vlmroll_processors.messages import Chat, read_messages, read_row
from vlmroll_processors.reading import Reader, fitting
from vlmroll_processors.rendering import OWN_TEMPLATE_KWARGS, adds_special_tokens, render, template_kwargs_of
from vlmroll_processors.turns import NextTurns
from vlmroll_processors.types import Prompt, Row

logger = logging.getLogger(__name__)


class PromptTooLong(ValueError):
    """A prompt has more than `max_prompt_length` tokens; the message names its row."""


@runtime_checkable
class ProcessorAdapter(Protocol):
    """What the trainer and the generators need of a processor."""

    @property
    def pad_token_id(self) -> int:
        """The id under padding."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a completion by the tokenizer's word; a model's generation config may name more."""
        ...

    @property
    def vision_ids(self) -> frozenset[int]:
        """The ids that no generator may sample."""
        ...

    def encode(self, rows: Sequence[Row], row_ids: Sequence[int] | None = None) -> list[Prompt]:
        """One prompt for each row; equal rows share one object. One that is too long raises `PromptTooLong`."""
        ...

    def next_turn(
        self,
        prompt: Prompt,
        completion_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        where: str = "the next turn",
    ) -> Prompt:
        """The prompt of the turn behind a sampled one and new messages; nothing is tokenised again."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        ...


class FamilyAdapter:
    """The adapter of a processor or tokenizer of transformers, by its family's data.

    Args:
        processor: the transformers processor or tokenizer.
        family: see `Family`.
        min_pixels, max_pixels: pixel budget of a picture; None leaves the processor's own.
        chat_template_kwargs: passed to the chat template.
        config: the model's config, or a function that loads it; videos of Qwen2.5-VL need it.
        max_prompt_length: most tokens of a prompt, pictures included; None for no limit.
        long_prompts: what becomes of a longer one: "raise" refuses it, "shrink" gives its pictures fewer pixels.
    """

    def __init__(
        self,
        processor: Any,
        family: Family,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        config: Any = None,
        max_prompt_length: int | None = None,
        long_prompts: Literal["raise", "shrink"] = "raise",
    ) -> None:
        self.processor = processor
        self.config = config
        self.family = family
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        budget = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        self.budget = {name: pixels for name, pixels in budget.items() if pixels is not None}
        self.max_prompt_length, self._shrink = max_prompt_length, long_prompts == "shrink"
        _check_budget(self.budget, family)
        if long_prompts not in ("raise", "shrink"):
            raise ValueError(
                f"long_prompts is 'raise' or 'shrink', got {long_prompts!r}; to skip rows, catch PromptTooLong"
            )
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1, got {max_prompt_length}")
        self._vision_tokens = family.vision_ids(self.tokenizer.get_added_vocab())
        self._turns = NextTurns(family, processor, self._vision_tokens)
        if own := [name for name in OWN_TEMPLATE_KWARGS if name in self.chat_template_kwargs]:
            raise ValueError(f"chat_template_kwargs: {own[0]} is set by the adapter; remove it")
        needed = (family.slot, family.feature_of("image"))
        vocabulary: dict[str, int] = self.tokenizer.get_vocab() if family.slot else {}
        if missing := [token for token in needed if token and token not in vocabulary]:
            raise ValueError(f"the tokenizer lacks the token {missing[0]} of the family {family.name}")

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's pad id, or its end-of-sequence id where it has none."""
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(self.tokenizer, name)
            if value is not None:
                return value
        raise ValueError("the tokenizer has neither a pad nor an eos token; set tokenizer.pad_token")

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokenizer's end-of-sequence id."""
        eos = self.tokenizer.eos_token_id
        return frozenset(() if eos is None else (eos,))

    @property
    def vision_ids(self) -> frozenset[int]:
        """The family's vision tokens that the tokenizer has."""
        return frozenset(self._vision_tokens.values())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def engine_picture(self, picture: Picture) -> Image.Image:
        """A picture for an engine that runs `engine_processor` by itself, so that it makes the same of it."""
        sized = Sized(image=picture.image, own=dict(picture.resize), budget=self.budget)
        return self.family.engine_picture(self.processor, sized)

    def engine_key(self, picture: Picture) -> str:
        """What tells a picture, in the size that an engine gets it, from every other: the key of its caches."""
        return repr((picture.sha256, picture.resize, sorted(self.budget.items())))

    def engine_processor(self) -> Any:
        """The processor that an engine has to run."""
        return self.family.engine_processor(self.processor, self.budget)

    def encode(self, rows: Sequence[Row], row_ids: Sequence[int] | None = None) -> list[Prompt]:
        """Encode rows; each distinct prompt and each distinct picture is processed once.

        Args:
            rows: dataset rows with the column `prompt`, and `image` or `images`, `video` or `videos` where there are
                pictures or videos.
            row_ids: the rows' numbers in the dataset, for error messages; by default 0, 1, ...

        Returns:
            One prompt for each row; rows that render alike share one object.

        Raises:
            ValueError: names the row, the column and the fix.
            PromptTooLong: the same, for a prompt over `max_prompt_length`.
        """
        if isinstance(rows, Mapping | str):
            raise ValueError("encode takes a list of rows; put the one row into a list")
        names = [f"row {i}" for i in (range(len(rows)) if row_ids is None else row_ids)]
        reader = Reader(self.family, self.processor, self.budget)
        prompts: dict[tuple[Any, ...], Prompt] = {}
        result: list[Prompt] = []
        for row, name in zip(rows, names, strict=True):
            chat = read_row(row, where=name)
            reader.check(chat.media)
            options = {**self.chat_template_kwargs, **template_kwargs_of(row, where=name)}
            reserved = self._vision_tokens
            spot = f"{name}, column 'prompt'"
            text = render(self.family, self.processor, chat, options, reserved=reserved, where=spot)
            result.append(self._prompt(chat, text, reader, prompts, where=name))
        return result

    def next_turn(
        self,
        prompt: Prompt,
        completion_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        where: str = "the next turn",
    ) -> Prompt:
        """The prompt of the turn that follows a sampled one; nothing that was there before is tokenised again.

        Args:
            prompt: what the turn was sampled from.
            completion_ids: the sampled ids with the stop token, if there was one; they stay as they are.
            messages: results of tools, or what the user says next, with their pictures in the content.
            template_kwargs: the row's own arguments for the chat template.
            where: names the messages in error messages.

        Returns:
            `prompt`'s ids, the sampled ids, and those of the messages and of the next assistant's header. It may be
            longer than `max_prompt_length`.

        Raises:
            ValueError: names what is wrong with a message or with a picture.
        """
        if held := self.vision_ids.intersection(completion_ids):
            raise ValueError(f"{where}: the sampled ids hold the reserved id {min(held)}; ban `vision_ids` in sampling")
        chat = read_messages(messages, {"image": [], "video": []}, where=where)
        reader = Reader(self.family, self.processor, self.budget)
        reader.check(chat.media)
        last = last_token(self.tokenizer, completion_ids)
        options = {**self.chat_template_kwargs, **(template_kwargs or {})}
        text = self._turns.text(chat, last, options, where=where)
        units = reader.read(chat.media)
        return extend(self.family, self.processor, self.config, prompt, completion_ids, text, units, where=where)

    def check_tools(self, pictures: bool) -> str:
        """How the chat template takes the results of tools, in words for a log.

        Raises:
            ValueError: it takes none, or none with pictures.
        """
        return self._turns.check_tools(self.chat_template_kwargs, pictures=pictures)

    def shows_tools(self, schemas: Sequence[Any]) -> bool:
        """Whether the chat template writes tools, given as JSON schemas or functions, into a prompt."""
        return self._turns.shows(schemas, self.chat_template_kwargs)

    def _prompt(
        self, chat: Chat, text: str, reader: Reader, prompts: dict[tuple[Any, ...], Prompt], *, where: str
    ) -> Prompt:
        """The row's prompt, short enough; from `prompts` if it is there already."""
        if len(chat.media) < self.family.min_pictures:
            raise ValueError(f"{where}: {self.family.name} takes no prompt without a picture; add one, or drop the row")
        special = adds_special_tokens(self.family, self.processor, chat, text)

        def made(media: Sequence[Medium]) -> Prompt:
            units = reader.read(media)
            key = (special, text, *(unit.key for unit in units))
            if key not in prompts:
                spot = f"{where}, column 'prompt'"
                found = assemble(self.family, self.processor, self.config, text, units, special=special, where=spot)
                if self.max_prompt_length is not None and found.num_tokens > self.max_prompt_length:
                    reader.forget(units)
                    return found
                reader.share(units, found.forward_kwargs)
                prompts[key] = found
            return prompts[key]

        prompt = made(chat.media)
        if self.max_prompt_length is None or prompt.num_tokens <= self.max_prompt_length:
            return prompt
        shrunk: Prompt | None = None
        if self._shrink and chat.media:
            most = self.budget.get("max_pixels", self.family.most_pixels(self.processor))
            bounds = self.budget.get("min_pixels"), most
            shrunk = fitting(chat.media, prompt, made, limit=self.max_prompt_length, bounds=bounds)
        if shrunk is not None:
            message = "%s: its pictures got fewer pixels, since it had %d tokens; now it has %d"
            logger.warning(message, where, prompt.num_tokens, shrunk.num_tokens)
            return shrunk
        tried = ", and its pictures cannot be shrunk enough" if self._shrink else ""
        raise PromptTooLong(
            f"{where}, column 'prompt': it has {prompt.num_tokens} tokens ({prompt.num_image_tokens} of pictures and "
            f"videos), and at most {self.max_prompt_length} may be (max_prompt_length, or what the model's positions "
            f"leave){tried}; shorten it, lower max_pixels, or drop the row"
        )


def _check_budget(budget: Mapping[str, Any], family: Family) -> None:
    if budget and not family.slot:
        raise ValueError(f"{next(iter(budget))} is set, but the model takes no pictures; leave it out")
    for name, pixels in budget.items():
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 1:
            raise ValueError(f"{name} must be a whole number of pixels above 0, got {pixels!r}")
    if len(budget) == 2 and budget["min_pixels"] > budget["max_pixels"]:
        raise ValueError(f"min_pixels={budget['min_pixels']} is above max_pixels={budget['max_pixels']}")
