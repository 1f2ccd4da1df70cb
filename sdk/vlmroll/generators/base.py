"""The contract of a generator, and a scripted one for tests and dry runs."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import ProcessorAdapter, Prompt


def stop_ids_of(model: Any, adapter: ProcessorAdapter) -> list[int]:
    """The ids that end a completion: those of the model's generation config and of the tokenizer together."""
    eos: int | list[int] | None = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    of_model = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return sorted(adapter.stop_ids.union(of_model))


@runtime_checkable
class Generator(Protocol):
    """Samples completions. Three methods; everything else about an engine stays inside.

    A generator may also have, as attributes: `has_mismatch`, True where its log-probabilities come from another
    implementation than the policy's, so that training corrects the difference; `max_model_length`, most tokens of
    prompt and completion together; `metric_name`, under which its time is logged; `collective`, True where several
    processes have to call it together, one of them perhaps without prompts; `text_only`, True where it takes no prompts
    with pictures.

    Attributes:
        banned_ids: the ids that it never samples; scoring gives them the probability 0.
    """

    @property
    def banned_ids(self) -> frozenset[int]:
        """See the class."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """`num_generations` completions for each prompt, in order."""
        ...

    def sync_weights(self, policy: Any) -> None:
        """Take over the policy's current weights."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class ScriptedGenerator:
    """Answers with completions written beforehand, in turn; remembers what it was asked.

    Args:
        script: completion ids, used one after the other and from the start again at the end.
        logprob: the log-probability that it reports for every token.
        banned_ids: the ids that its script never uses.

    Example:
        >>> prompt = Prompt(prompt_ids=(5,), engine_ids=(5,))
        >>> ScriptedGenerator([[7, 8]]).generate([prompt], SamplingParams(), 2).completion_ids
        [[7, 8], [7, 8]]
    """

    def __init__(
        self, script: Sequence[Sequence[int]], *, logprob: float = -1.0, banned_ids: frozenset[int] = frozenset()
    ) -> None:
        self._script = [tuple(ids) for ids in script]
        self.banned_ids = banned_ids
        self._logprob = logprob
        self._next = 0
        self.requests: list[tuple[tuple[Prompt, ...], SamplingParams, int]] = []
        self.policy_version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """The next `len(prompts) * num_generations` completions of the script, cut at their limits."""
        self.requests.append((tuple(prompts), sampling, num_generations))
        limits = sampling.limits_of(len(prompts))
        return GenerationOutput(
            prompts=tuple(prompts),
            prompt_ids=tuple(prompt.prompt_ids for prompt in prompts),
            completions=tuple(tuple(self._completion(limit) for _ in range(num_generations)) for limit in limits),
        )

    def _completion(self, max_tokens: int) -> Completion:
        ids = self._script[self._next % len(self._script)]
        self._next += 1
        cut = ids[:max_tokens]
        return Completion(
            completion_ids=cut,
            logprobs=(self._logprob,) * len(cut),
            finish_reason="length" if len(cut) < len(ids) else "stop",
            policy_version=self.policy_version,
        )

    def sync_weights(self, policy: Any) -> None:
        """Count the call."""
        self.policy_version += 1

    def close(self) -> None:
        """Nothing to free."""
