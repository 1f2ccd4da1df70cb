"""Dataset rows -> `Prompt` values, for any family.

`load_adapter` picks the family of a processor; `encode` does the rest: rows become chats with their pictures in their
slots, the chat template renders them, the tokenizer reads the text with one placeholder for each picture
(`engine_ids`), and each placeholder is replaced by as many as the picture has features (`prompt_ids`).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jinja2 import TemplateError

from vlmroll_processors.families import TEXT, Family, family_of
from vlmroll_processors.families.base import PictureKwargs
from vlmroll_processors.images import Picture
from vlmroll_processors.messages import Chat, read_row, without_nulls
from vlmroll_processors.types import ImageSpan, Prompt, Row

_OWN_TEMPLATE_KWARGS = ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message")


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
    """

    def __init__(
        self,
        processor: Any,
        family: Family,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.processor = processor
        self.family = family
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        budget = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        self._budget = {name: pixels for name, pixels in budget.items() if pixels is not None}
        _check_budget(self._budget, family)
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self._placeholder_id = vocabulary.get(family.placeholder)
        self._vision_ids = frozenset(vocabulary[token] for token in family.vision_tokens if token in vocabulary)
        if own := [name for name in _OWN_TEMPLATE_KWARGS if name in self._chat_template_kwargs]:
            raise ValueError(f"chat_template_kwargs: {own[0]} is set by the adapter; remove it")
        if family.placeholder and self._placeholder_id is None:
            raise ValueError(f"the tokenizer lacks the token {family.placeholder} of the family {family.name}")

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
        return self._vision_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode(self, rows: Sequence[Row], row_ids: Sequence[int] | None = None) -> list[Prompt]:
        """Encode rows; each distinct prompt and each distinct picture is processed once.

        Args:
            rows: dataset rows with the column `prompt`, and `image` or `images` where there are pictures.
            row_ids: the rows' numbers in the dataset, for error messages; by default 0, 1, ...

        Returns:
            One prompt for each row; rows that render alike share one object.

        Raises:
            ValueError: names the row, the column and the fix.
        """
        if isinstance(rows, Mapping | str):
            raise ValueError("encode takes a list of rows; put the one row into a list")
        names = [f"row {i}" for i in (range(len(rows)) if row_ids is None else row_ids)]
        chats = [read_row(row, where=name) for row, name in zip(rows, names, strict=True)]
        features = self._process(chats)
        prompts: dict[tuple[Any, ...], Prompt] = {}
        result: list[Prompt] = []
        for row, chat, name in zip(rows, chats, names, strict=True):
            text = self._render(chat, _template_kwargs(row, where=name), where=name)
            key = (chat.messages is None, text, *(picture.key for picture in chat.pictures))
            if key not in prompts:
                prompts[key] = self._prompt(chat, text, features, where=name)
            result.append(prompts[key])
        return result

    def _process(self, chats: Iterable[Chat]) -> dict[Any, PictureKwargs]:
        """The forward kwargs of each distinct picture, by its key."""
        distinct: dict[Any, Picture] = {}
        owner: dict[Any, str] = {}
        for chat in chats:
            for picture, spot in zip(chat.pictures, chat.spots, strict=True):
                if not self.family.placeholder:
                    raise ValueError(f"{spot}: a picture, but the model takes text only; drop the picture")
                distinct.setdefault(picture.key, picture)
                owner.setdefault(picture.key, spot)
        if not distinct:
            return {}
        try:
            kwargs = self.family.process(self.processor, tuple(distinct.values()), self._budget)
        except ValueError as error:
            # The processor names no row: find the picture that it refuses, one at a time.
            for key, picture in distinct.items():
                try:
                    self.family.process(self.processor, (picture,), self._budget)
                except ValueError as single:
                    size = "x".join(map(str, picture.image.size))
                    raise ValueError(
                        f"{owner[key]}: the processor refuses a picture of {size} pixels: {single}"
                    ) from error
            raise
        return dict(zip(distinct, kwargs, strict=True))

    def _render(self, chat: Chat, template_kwargs: Mapping[str, Any], *, where: str) -> str:
        """The prompt as text, with one placeholder for each picture."""
        for text in chat.texts():
            if reserved := [token for token in self.family.vision_tokens if token in text]:
                raise ValueError(
                    f"{where}, column 'prompt': the text holds the reserved {reserved[0]}; write "
                    "<image> or an image part where a picture goes, or remove it"
                )
        if chat.messages is None:
            return self.family.picture_slot.join(chat.segments)
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

    def _prompt(self, chat: Chat, text: str, features: Mapping[Any, PictureKwargs], *, where: str) -> Prompt:
        # A template writes the special tokens itself; a plain string gets what the tokenizer's own rule gives it.
        try:
            engine_ids: list[int] = self.tokenizer(text, add_special_tokens=chat.messages is None)["input_ids"]
        except TypeError as error:  # the tokenizer's word for text that is not valid Unicode
            raise ValueError(f"{where}, column 'prompt': the text cannot be tokenised: {error}") from error
        pictures = [features[picture.key] for picture in chat.pictures]
        slots = engine_ids.count(self._placeholder_id) if self._placeholder_id is not None else 0
        if slots != len(pictures):
            raise ValueError(
                f"{where}, column 'prompt': the chat template rendered {slots} picture slots for {len(pictures)} "
                "pictures; put pictures only into messages whose role the template gives pictures to"
            )
        prompt_ids: list[int] = []
        spans: list[ImageSpan] = []
        for token in engine_ids:
            if token == self._placeholder_id:
                length = self.family.count_tokens(self.processor, pictures[len(spans)])
                spans.append(ImageSpan(offset=len(prompt_ids), length=length))
                prompt_ids.extend([token] * length)
            else:
                prompt_ids.append(token)
        if not prompt_ids:
            raise ValueError(f"{where}, column 'prompt': it renders to no tokens; give a prompt that is not empty")
        names = pictures[0] if pictures else ()
        kwargs = {name: torch.cat([picture[name] for picture in pictures]) for name in names}
        kwargs |= self.family.token_kwargs(self.processor, len(prompt_ids), spans, pictures)
        return Prompt(
            prompt_ids=tuple(prompt_ids),
            engine_ids=tuple(engine_ids),
            text=text,
            images=chat.pictures,
            image_spans=tuple(spans),
            forward_kwargs=kwargs,
            join=self.family.join,
        )


def _check_budget(budget: Mapping[str, Any], family: Family) -> None:
    if budget and not family.placeholder:
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


def load_adapter(
    model: Any,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> FamilyAdapter:
    """The adapter of a model.

    Args:
        model: a hub id, a path, or a processor or tokenizer of transformers.
        min_pixels, max_pixels: pixel budget of a picture (height x width); None leaves the processor's own.
        chat_template_kwargs: passed to the chat template, such as `{"enable_thinking": False}`.
        trust_remote_code, revision: passed to `from_pretrained` when `model` is an id or a path.

    Raises:
        ValueError: no family serves the processor.

    Example:
        >>> adapter = load_adapter("assets/tiny-vl")  # doctest: +SKIP
        >>> adapter.encode([{"prompt": "Hi"}])[0].prompt_ids  # doctest: +SKIP
    """
    if isinstance(model, str | Path):
        from transformers import AutoProcessor

        model = AutoProcessor.from_pretrained(str(model), trust_remote_code=trust_remote_code, revision=revision)
    return FamilyAdapter(
        model,
        family_of(model),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        chat_template_kwargs=chat_template_kwargs,
    )
