"""`rollout_func`: completions by a function of the user's own, in the place of generator and tools.

It takes what it names, all for the prompts of one call: `encoded` (their `Prompt`s), `prompts` (as the rows hold them),
`rows`, `sampling`, `num_generations` and `trainer`. It returns a `GenerationOutput`, as generators do, with
`num_generations` completions for each prompt; completions of several turns say what was sampled (`Turns`):

    def rollout_func(encoded, sampling, num_generations, trainer):
        return trainer.generator.generate(encoded, sampling, num_generations)

For prompts of text it may also return a dict, as for TRL: `prompt_ids`, `completion_ids` and `logprobs`, a list for
each completion, `env_mask` with 1 on ids that the model sampled, and lists of further values for the reward functions.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from vlmroll.starts import Opened
from vlmroll.types import Completion, GenerationOutput, SamplingParams, Turns
from vlmroll_processors import Continuation, Prompt

RolloutFunc = Callable[..., GenerationOutput | Mapping[str, Any]]
_GIVEN = ("encoded", "prompts", "rows", "sampling", "num_generations", "trainer")
_NEEDED = ("prompt_ids", "completion_ids", "logprobs")


class OwnRollouts:
    """Calls a `rollout_func` and checks what it returns.

    Args:
        function: see the module.
        trainer: handed to it.
        stop_ids: the ids that end a completion.

    Raises:
        ValueError: it asks for something else than there is.
    """

    def __init__(self, function: RolloutFunc, trainer: Any, stop_ids: Collection[int]) -> None:
        if not callable(function):
            raise ValueError(f"rollout_func is {function!r}; give a function")
        parameters = inspect.signature(function).parameters.values()
        self._named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        needed = [p.name for p in parameters if p.name in self._named and p.default is p.empty]
        if missing := [name for name in needed if name not in _GIVEN]:
            raise ValueError(f"rollout_func asks for {missing[0]!r}; it is given {', '.join(_GIVEN)}")
        self._function, self._trainer, self._stop_ids = function, trainer, stop_ids

    def __call__(
        self,
        opened: Opened,
        shares: Sequence[int],
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        num_generations: int,
    ) -> Sequence[tuple[Completion, ...]]:
        """The completions of some shares; see `vlmroll.episodes.Sample`.

        Raises:
            ValueError: they are not those of the prompts.
        """
        rows = [opened.rows[share] for share in shares]
        given = {
            "encoded": list(prompts),
            "prompts": [row["prompt"] for row in rows],
            "rows": rows,
            "sampling": sampling,
            "num_generations": num_generations,
            "trainer": self._trainer,
        }
        output = self._function(**{name: value for name, value in given.items() if self._all or name in self._named})
        row_ids = [opened.row_ids[share] for share in shares]
        if isinstance(output, Mapping):
            return self._from_lists(output, prompts, num_generations, row_ids)
        if not isinstance(cast("object", output), GenerationOutput):
            raise ValueError(f"rollout_func returned a {type(output).__name__}; return a GenerationOutput")
        if len(output.prompts) != len(prompts) or any(a is not b for a, b in zip(output.prompts, prompts, strict=True)):
            raise ValueError("rollout_func returned completions of other prompts; keep `encoded` and its order")
        return output.completions

    def _from_lists(
        self, output: Mapping[str, Any], prompts: Sequence[Prompt], num_generations: int, row_ids: Sequence[int]
    ) -> list[tuple[Completion, ...]]:
        if missing := [name for name in _NEEDED if name not in output]:
            raise ValueError(f"rollout_func returned a dict without {missing[0]!r}; it needs {', '.join(_NEEDED)}")
        total = len(prompts) * num_generations
        for name, values in output.items():
            if not isinstance(values, Sequence) or len(cast("Sequence[Any]", values)) != total:
                raise ValueError(f"rollout_func: {name!r} needs a list with a value for each of {total} completions")
        completions: list[Completion] = []
        for i in range(total):
            prompt, row_id = prompts[i // num_generations], row_ids[i // num_generations]
            if prompt.images or prompt.videos:
                raise ValueError(f"row {row_id}: it has pictures; a rollout_func returns a GenerationOutput for those")
            if tuple(output["prompt_ids"][i]) != prompt.prompt_ids:
                raise ValueError(
                    f"row {row_id}: rollout_func returned prompt_ids that are not those of the encoded prompt; "
                    "continue `encoded[i].prompt_ids`"
                )
            try:
                completions.append(self._completion({name: values[i] for name, values in output.items()}, prompt))
            except ValueError as error:
                raise ValueError(f"row {row_id}: rollout_func: {error}") from error
        return [tuple(completions[i : i + num_generations]) for i in range(0, total, num_generations)]

    def _completion(self, values: Mapping[str, Any], prompt: Prompt) -> Completion:
        ids = tuple(values["completion_ids"])
        extra = {name: value for name, value in values.items() if name not in (*_NEEDED, "env_mask")}
        mask = tuple(map(int, values.get("env_mask", (1,) * len(ids))))
        turns = Turns(sampled=mask, continuation=Continuation(start=prompt, prompt=prompt), extra=extra)
        return Completion(
            completion_ids=ids,
            logprobs=tuple(map(_number, values["logprobs"])),
            finish_reason="stop" if ids and ids[-1] in self._stop_ids else "length",
            turns=turns,
        )


def _number(value: Any) -> float:
    """A log-probability; TRL's engines give that of the sampled id alone in a list."""
    if isinstance(value, Sequence) and len(cast("Sequence[Any]", value)) == 1:
        value = value[0]
    if not isinstance(value, int | float):
        raise ValueError(f"logprobs hold {value!r:.60}; give one number for each id, that of the sampled one")
    return float(value)
