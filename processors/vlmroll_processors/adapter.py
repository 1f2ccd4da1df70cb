"""Dataset rows -> `Prompt` values, for any family.

`load_adapter` picks the family of a processor; `encode` does the rest: rows become chats with their pictures in their
slots, the chat template renders them, the tokenizer reads the text with one placeholder for each picture
(`engine_ids`), and the text in which each placeholder has given way to what the picture brings (`prompt_ids`).
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from jinja2 import TemplateError

from vlmroll_processors.assembly import assemble
from vlmroll_processors.families import FAMILIES, TEXT, Family, family_of
from vlmroll_processors.messages import Chat, read_row, without_nulls
from vlmroll_processors.reading import Reader, smaller
from vlmroll_processors.types import Prompt, Row

logger = logging.getLogger(__name__)
_OWN_TEMPLATE_KWARGS = ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message")
_FEWEST_PIXELS = 28 * 28


class PromptTooLong(ValueError):
    """A prompt has more than `max_prompt_length` tokens.

    Attributes:
        index: which of the rows given to `encode` it is.
    """

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


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
        """One prompt for each row; equal rows share one object."""
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
        config: the model's config; videos of Qwen2.5-VL need it.
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
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        budget = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        self.budget = {name: pixels for name, pixels in budget.items() if pixels is not None}
        self._limit, self._shrink = max_prompt_length, long_prompts == "shrink"
        _check_budget(self.budget, family)
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self._vision_tokens = family.vision_ids(vocabulary)
        if own := [name for name in _OWN_TEMPLATE_KWARGS if name in self._chat_template_kwargs]:
            raise ValueError(f"chat_template_kwargs: {own[0]} is set by the adapter; remove it")
        needed = (family.slot, family.feature_of("image"))
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
        for index, (row, name) in enumerate(zip(rows, names, strict=True)):
            chat = read_row(row, where=name)
            reader.check(chat.media)
            text = self._render(chat, _template_kwargs(row, where=name), where=name)
            try:
                result.append(self._prompt(chat, text, reader, prompts, where=name))
            except PromptTooLong as error:
                raise PromptTooLong(str(error), index) from None
        return result

    def _prompt(
        self, chat: Chat, text: str, reader: Reader, prompts: dict[tuple[Any, ...], Prompt], *, where: str
    ) -> Prompt:
        """The row's prompt, short enough; from `prompts` if it is there already."""
        media, pixels = chat.media, 0
        if len(media) < self.family.min_pictures:
            raise ValueError(f"{where}: {self.family.name} takes no prompt without a picture; add one, or drop the row")
        while True:
            units = reader.read(media)
            key = (chat.messages is None, text, *(medium.key for unit in units for medium in unit.media))
            if key not in prompts:
                special = self._adds_special_tokens(chat, text)
                prompts[key] = assemble(
                    self.family, self.processor, self.config, text, units, special=special, where=where
                )
            prompt = prompts[key]
            if self._limit is None or prompt.num_tokens <= self._limit:
                return prompt
            sizes = [medium.size[0] * medium.size[1] for unit in units for medium in unit.media]
            pixels = _fewer_pixels(prompt, self._limit, pixels or max(sizes, default=0))
            if not self._shrink or pixels < _FEWEST_PIXELS:
                tried = ", and its pictures cannot be shrunk enough" if self._shrink else ""
                raise PromptTooLong(
                    f"{where}, column 'prompt': it has {prompt.num_tokens} tokens ({prompt.num_image_tokens} of "
                    f"pictures), more than max_prompt_length={self._limit}{tried}; shorten it, lower max_pixels, or "
                    "drop the row"
                )
            media = tuple(smaller(chat.media, pixels))

    def _adds_special_tokens(self, chat: Chat, text: str) -> bool:
        """Whether the tokenizer adds its special tokens: by the processor's rule, but never a second one in front."""
        if chat.messages is not None and (self.processor is self.tokenizer or self.family is TEXT):
            return False  # a tokenizer's template writes them itself
        rules = getattr(getattr(self.processor, "valid_processor_kwargs", None), "_defaults", {})
        adds = rules.get("text_kwargs", {}).get("add_special_tokens", True)
        bos = self.tokenizer.bos_token
        return adds and not (chat.messages is not None and bos is not None and text.startswith(bos))

    def _render(self, chat: Chat, template_kwargs: Mapping[str, Any], *, where: str) -> str:
        """The prompt as text, with one placeholder for each picture."""
        for text in chat.texts():
            if reserved := [token for token in self._vision_tokens if token in text]:
                raise ValueError(
                    f"{where}, column 'prompt': the text holds the reserved {reserved[0]}; write "
                    "<image> or an image part where a picture goes, or remove it"
                )
        if chat.messages is None:
            written = [self.family.written_as(medium.kind) for medium in chat.media]
            return "".join(piece for pair in zip(chat.segments, [*written, ""], strict=True) for piece in pair)
        if getattr(self.processor, "chat_template", None) is None:
            raise ValueError(
                f"{where}, column 'prompt': the tokenizer has no chat template; give plain strings, or set "
                "processing_class.chat_template"
            )
        messages = [_text_only(message) for message in chat.messages] if self.family is TEXT else list(chat.messages)
        goes_on = messages[-1]["role"] == "assistant"
        try:
            return self.processor.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                **{**self._chat_template_kwargs, **template_kwargs},
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            # Templates refuse roles and orders in words of their own, or trip over values that they do not expect.
            raise ValueError(f"{where}, column 'prompt': the chat template refuses the messages: {error}") from error


def _fewer_pixels(prompt: Prompt, limit: int, pixels: int) -> int:
    """The next pixel budget to try for a prompt over the limit; 0 when its text alone is too long."""
    room = limit - (prompt.num_tokens - prompt.num_image_tokens)
    return int(pixels * min(room / prompt.num_image_tokens, 0.8)) if room > 0 and prompt.num_image_tokens else 0


def _check_budget(budget: Mapping[str, Any], family: Family) -> None:
    if budget and not family.slot:
        raise ValueError(f"{next(iter(budget))} is set, but the model takes no pictures; leave it out")
    for name, pixels in budget.items():
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 1:
            raise ValueError(f"{name} must be a whole number of pixels above 0, got {pixels!r}")
    if len(budget) == 2 and budget["min_pixels"] > budget["max_pixels"]:
        raise ValueError(f"min_pixels={budget['min_pixels']} is above max_pixels={budget['max_pixels']}")


def _template_kwargs(row: Row, *, where: str) -> dict[str, Any]:
    value = row.get("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}, column 'chat_template_kwargs': give a mapping, got {type(value).__name__}")
    kwargs = without_nulls(value)  # Arrow gives every row the keys of all rows
    if own := [name for name in _OWN_TEMPLATE_KWARGS if name in kwargs]:
        raise ValueError(f"{where}, column 'chat_template_kwargs': {own[0]} is set by the adapter; remove it")
    return kwargs


def _text_only(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined to a string, as templates of text models expect."""
    if "content" not in message:
        return dict(message)
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def _inferred(processor: Any) -> Family:
    """The generic rule for a processor without a row of its own, once it has passed the conformance kit."""
    from vlmroll_processors.conformance import check
    from vlmroll_processors.families.generic import infer_family

    try:
        family = infer_family(processor)
        check(FamilyAdapter(processor, family)).raise_for_failures()
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        known = ", ".join(sorted(name for family in FAMILIES for name in family.processors))
        raise ValueError(
            f"the processor {type(processor).__name__} has no family, and the generic rule does not fit it ({error}); "
            f"families with pictures: {known}. CONTRIBUTING.md tells how to add one"
        ) from error
    logger.warning("%s has no family of its own; the generic rule passed the conformance kit", family.name)
    return family


def load_adapter(
    model: Any,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    config: Any = None,
    max_prompt_length: int | None = None,
    long_prompts: Literal["raise", "shrink"] = "raise",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> FamilyAdapter:
    """The adapter of a model.

    Args:
        model: a hub id, a path, or a processor or tokenizer of transformers.
        min_pixels, max_pixels: pixel budget of a picture (height x width); None leaves the processor's own.
        chat_template_kwargs: passed to the chat template, such as `{"enable_thinking": False}`.
        config: the model's config, which some videos need; of an id or a path it is loaded.
        max_prompt_length, long_prompts: most tokens of a prompt, and whether a longer one is refused or its pictures
            are shrunk.
        trust_remote_code, revision: passed to `from_pretrained` when `model` is an id or a path.

    Raises:
        ValueError: no family serves the processor.

    Example:
        >>> adapter = load_adapter("assets/tiny-vl")  # doctest: +SKIP
        >>> adapter.encode([{"prompt": "Hi"}])[0].prompt_ids  # doctest: +SKIP
    """
    if isinstance(model, str | Path):
        from transformers import AutoConfig, AutoProcessor

        if config is None:
            config = AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code, revision=revision)
        model = AutoProcessor.from_pretrained(str(model), trust_remote_code=trust_remote_code, revision=revision)
    return FamilyAdapter(
        model,
        family_of(model) or _inferred(model),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        chat_template_kwargs=chat_template_kwargs,
        config=config,
        max_prompt_length=max_prompt_length,
        long_prompts=long_prompts,
    )
