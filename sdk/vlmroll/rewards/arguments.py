"""What a reward function is given: the columns of its completions, and what it asks for among them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from PIL import Image

from vlmroll.observations import with_observation
from vlmroll.types import Rollout
from vlmroll_processors import Picture

CONTEXT = ("trainer_state", "log_metric", "log_extra")
_OURS = ("prompts", "completions", "completion_ids", *CONTEXT)


def columns_of(rollouts: Sequence[Rollout], texts: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of the rows, one value for each completion, with `prompts`, `completions` and so on.

    Lists and mappings are copied for every completion, so that a function that changes them changes nothing else.

    Raises:
        ValueError: a column of the dataset has the name of one of ours.
    """
    names = sorted({name for rollout in rollouts for name in rollout.row} - {"prompt", "images"})
    if taken := [name for name in names if name in _OURS]:
        raise ValueError(
            f"row {rollouts[0].row_id}: the column {taken[0]!r} has the name of an argument that reward functions get; "
            "rename the column"
        )
    columns: dict[str, list[Any]] = {name: [own(rollout.row.get(name)) for rollout in rollouts] for name in names}
    columns["prompts"] = [_prompt_of(rollout) for rollout in rollouts]
    columns["completions"] = [
        completion_of(rollout.row["prompt"], text, () if turns is None else turns.messages)
        for rollout, text, turns in zip(rollouts, texts, (r.completion.turns for r in rollouts), strict=True)
    ]
    columns["completion_ids"] = [list(rollout.completion.completion_ids) for rollout in rollouts]
    pictures = {id(rollout.prompt): Pictures(rollout.prompt.images) for rollout in rollouts}
    columns["images"] = [pictures[id(rollout.prompt)] for rollout in rollouts]
    extras = [{} if r.completion.turns is None else r.completion.turns.extra for r in rollouts]
    names = sorted({name for extra in extras for name in extra})
    if taken := [name for name in names if name in (*_OURS, *columns)]:
        raise ValueError(
            f"rollout_func: the values {taken[0]!r} have the name of an argument that reward functions get already; "
            "rename them"
        )
    return columns | {name: [own(extra.get(name)) for extra in extras] for name in names}


def _prompt_of(rollout: Rollout) -> Any:
    """The row's prompt, with what an environment added to it."""
    prompt = own(rollout.row["prompt"])
    return with_observation(prompt, rollout.observation) if rollout.observation else prompt


class Pictures(Sequence[Image.Image]):
    """The pictures of a prompt, each decoded when a function asks for it: those that take `**kwargs` seldom do."""

    def __init__(self, pictures: Sequence[Picture]) -> None:
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._pictures[index]
        return Pictures(chosen) if isinstance(chosen, Sequence) else chosen.image

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast("Sequence[Any]", other))


def own(value: Any) -> Any:
    """A copy of nested lists and mappings; what they hold is shared."""
    if isinstance(value, Mapping):
        return {key: own(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        return [own(item) for item in cast("list[Any]", value)]
    return value


def completion_of(prompt: Any, text: str, turns: Sequence[Mapping[str, Any]] = ()) -> str | list[dict[str, Any]]:
    """A completion in the form of its prompt: a string, or messages: one of the assistant, or those of all turns.

    When the prompt ends in an assistant message, the completion carries that message on and holds its text too.
    """
    if isinstance(prompt, str):
        return text
    messages = own(list(turns)) if turns else [{"role": "assistant", "content": text}]
    last = prompt[-1]
    if last["role"] == "assistant":
        content = last["content"]
        said = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
        messages[0]["content"] = said + messages[0]["content"]
    return messages


def accepted(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function names, or all when it takes `**kwargs`.

    Raises:
        ValueError: it asks for something that is not there, or by position only.
    """
    parameters = inspect.signature(function).parameters.values()
    if positional := [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]:
        raise ValueError(f"reward function {name!r} takes {positional[0]!r} by position only; drop the '/'")
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        raise ValueError(f"reward function {name!r} takes *args, but is called by names; name its arguments")
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if missing := [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in given]:
        hint = "it is there with an environment_factory alone, and " if missing[0] == "environments" else ""
        raise ValueError(
            f"reward function {name!r} asks for {missing[0]!r}, which is no column of the rows; {hint}there are "
            f"{', '.join(sorted(given))}"
        )
    arguments = {parameter.name: given[parameter.name] for parameter in named if parameter.name in given}
    if "images" in arguments:
        arguments["images"] = _decoded(arguments["images"])
    return arguments if len(named) == len(parameters) else {**given, **arguments}


def _decoded(images: Sequence[Sequence[Image.Image]]) -> list[list[Image.Image]]:
    """The pictures as plain lists, each prompt's decoded once."""
    once = {id(pictures): list(pictures) for pictures in images}
    return [list(once[id(pictures)]) for pictures in images]
