"""A completion of several turns: what the turns added to the prompt that it began with.

`start` is the prompt of a rollout, which its siblings share; `prompt` is that of its last turn. It begins with the ids
of `start`, goes on with all that was sampled and added since, and has the tensors of all pictures so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vlmroll_processors.types import JOINED_ON, ImageSpan, JoinKind, Prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Continuation:
    """A prompt and the later one that goes on from it.

    Attributes:
        start: the prompt that the completion began with.
        prompt: the prompt of its last turn.
        added: what is new in `prompt`, as a prompt of its own; None where nothing is.
        alike: whether the tokens of `start` have the same tensors in both. In some families a later picture changes
            what an earlier token attends to; then nothing of `start` can be shared with its siblings.

    Raises:
        ValueError: `prompt` does not begin with `start`.

    Example:
        >>> start = Prompt(prompt_ids=(5, 6), engine_ids=(5, 6))
        >>> later = Prompt(prompt_ids=(5, 6, 7, 8), engine_ids=(5, 6, 7, 8))
        >>> Continuation(start=start, prompt=later).added.prompt_ids
        (7, 8)
    """

    start: Prompt
    prompt: Prompt
    added: Prompt | None = field(init=False)
    alike: bool = field(init=False)

    def __post_init__(self) -> None:
        start, prompt = self.start, self.prompt
        if prompt.prompt_ids[: start.num_tokens] != start.prompt_ids:
            raise ValueError(
                f"the {prompt.num_tokens} ids of a later turn do not begin with the {start.num_tokens} of the prompt; "
                "make it with adapter.next_turn, which only appends"
            )
        if prompt.images[: len(start.images)] != start.images or prompt.videos[: len(start.videos)] != start.videos:
            raise ValueError("the pictures of a later turn do not begin with those of the prompt")
        object.__setattr__(self, "added", _added(start, prompt) if prompt.num_tokens > start.num_tokens else None)
        object.__setattr__(self, "alike", _alike(start, prompt))

    def check(self, start: Prompt, completion_ids: Sequence[int], *, where: str) -> None:
        """Refuse to be of another prompt and completion.

        Raises:
            ValueError: names the row.
        """
        added = () if self.added is None else self.added.prompt_ids
        if self.start is not start or tuple(completion_ids[: len(added)]) != added:
            raise ValueError(f"{where}: its completion does not begin with the ids that its turns added to its prompt")


def _added(start: Prompt, prompt: Prompt) -> Prompt:
    first = start.num_tokens
    kwargs: dict[str, torch.Tensor] = {}
    for name, tensor in prompt.forward_kwargs.items():
        rule = prompt.join[name]
        per_token = rule.kind is JoinKind.TOKENS
        axis = rule.token_axis if per_token else JOINED_ON[rule.kind]
        own = start.forward_kwargs.get(name)
        before = first if per_token else 0 if own is None else own.shape[axis]
        if length := tensor.shape[axis] - before:
            kwargs[name] = tensor.narrow(axis, before, length)

    def shifted(spans: tuple[ImageSpan, ...]) -> tuple[ImageSpan, ...]:
        return tuple(ImageSpan(offset=span.offset - first, length=span.length) for span in spans)

    return Prompt(
        prompt_ids=prompt.prompt_ids[first:],
        engine_ids=prompt.prompt_ids[first:],
        images=prompt.images[len(start.images) :],
        image_spans=shifted(prompt.image_spans[len(start.images) :]),
        videos=prompt.videos[len(start.videos) :],
        video_spans=shifted(prompt.video_spans[len(start.videos) :]),
        units=prompt.units[len(start.units) :],
        forward_kwargs=kwargs,
        join=prompt.join,
        batch_key=prompt.batch_key,
    )


def _alike(start: Prompt, prompt: Prompt) -> bool:
    for name, tensor in prompt.forward_kwargs.items():
        rule = prompt.join[name]
        if rule.kind is not JoinKind.TOKENS:
            continue
        before = start.forward_kwargs.get(name)
        if before is None or not torch.equal(tensor.narrow(rule.token_axis, 0, start.num_tokens), before):
            return False
    return True
