"""What vLLM is asked and what it answers, the same in the process and over HTTP."""

import difflib
import hashlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import Prompt
from vlmroll_processors.adapter import FamilyAdapter

logger = logging.getLogger(__name__)

TESTED = ("0.32", "0.33")
"""Releases of vLLM that this was tested with, first and last."""
HOTTEST = 2.0
"""The highest temperature that vLLM takes."""
INSTALL = 'python -m pip install "vlmroll[vllm]"'

_OWN = {
    "n": "num_generations",
    "seed": "the run's seed",
    "max_tokens": "max_completion_length",
    "temperature": "the option temperature",
    "top_p": "the option top_p",
    "top_k": "the option top_k",
    "min_p": "the option min_p",
    "repetition_penalty": "the option repetition_penalty",
}
# What of vLLM's SamplingParams `generation_kwargs` may hold: plain data that keeps what a completion consists of.
_OFFERED = (
    *("stop", "stop_token_ids", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "extra_args"),
)


def require_vllm(*, server: bool = False) -> None:
    """Refuse to go on without vLLM.

    Args:
        server: it runs somewhere else; then it is needed here only to send weights from an accelerator.

    Raises:
        ImportError: says how to install it.
    """
    if importlib.util.find_spec("vllm") is None and not server:
        raise ImportError(f"vLLM is not installed; run: {INSTALL} (its CPU build: see CONTRIBUTING.md)")


def check_version(version: str, where: str) -> None:
    """Warn of a release of vLLM that was not tested.

    Args:
        where: whose version it is, for the message.
    """
    release = _release(version)
    if release and not _release(TESTED[0]) <= release <= _release(TESTED[1]):
        logger.warning(
            "%s is vLLM %s; this was tested with %s to %s. Run `vlmroll check` before a long run",
            where,
            version,
            *TESTED,
        )


def _release(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse sampling options that vLLM does not take from `generation_kwargs`.

    Raises:
        ValueError: names the option and what to write instead.
    """
    for name in extra:
        if name in _OWN:
            raise ValueError(f"generation_kwargs: {name!r} is set by {_OWN[name]}")
        if name not in _OFFERED:
            near = difflib.get_close_matches(name, _OFFERED, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {sorted(_OFFERED)}"
            raise ValueError(f"generation_kwargs: vLLM has no {name!r} that could be set here; {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bans:
    """Ids that must not be sampled, in the form that vLLM takes.

    Attributes:
        words: texts of those that are a token of their own; their probability becomes 0.
        others: the rest, whose logits are lowered by 100.
    """

    words: tuple[str, ...]
    others: tuple[int, ...]


def bans_of(adapter: FamilyAdapter, banned_ids: frozenset[int]) -> Bans:
    """The bans for vLLM, which takes words and tokenises them itself."""
    words: list[str] = []
    others: list[int] = []
    for token_id in sorted(banned_ids):
        text: str | None = adapter.tokenizer.convert_ids_to_tokens(token_id)
        alone = text is not None and _tokens_that_vllm_bans(adapter, text) == {token_id}
        (words if alone else others).append(text if alone else token_id)  # pyright: ignore
    return Bans(words=tuple(words), others=tuple(others))


def _tokens_that_vllm_bans(adapter: FamilyAdapter, word: str) -> set[int] | None:
    """The ids that a word becomes, at the start of a text and behind a space; None where it is more than one token."""
    start, inside = (adapter.tokenizer.encode(text + word.lstrip(), add_special_tokens=False) for text in ("", " "))
    if len(start) != 1:
        return None
    return {*start, *(inside if len(inside) == 1 else ())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt's request.

    Attributes:
        prompt: what to continue.
        options: of vLLM's SamplingParams, as plain data.
    """

    prompt: Prompt
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMaker:
    """Turns prompts into requests.

    Attributes:
        bans: see `bans_of`.
        stop_ids: the ids that end a completion.
        regex: what every completion has to match; None for no rule.
        max_model_length: most tokens of prompt and completion together; None for no limit.
    """

    bans: Bans
    stop_ids: Sequence[int]
    regex: str | None = None
    max_model_length: int | None = None
    _common: dict[str, Any] = field(default_factory=dict[str, Any], init=False, repr=False)

    def make(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> list[Request]:
        """A request for each prompt, with a seed of its own.

        Raises:
            ValueError: names the prompt that cannot be sent, before any is.
        """
        if not prompts or num_generations < 1:
            raise ValueError(f"nothing to generate: {len(prompts)} prompts, {num_generations} generations each")
        check_extra(sampling.extra)
        if sampling.temperature > HOTTEST:
            raise ValueError(f"temperature={sampling.temperature}: vLLM takes at most {HOTTEST}; lower it")
        common, requests = self._options(sampling, num_generations), list[Request]()
        for i, (prompt, limit) in enumerate(zip(prompts, sampling.limits_of(len(prompts)), strict=True)):
            self._check(i, prompt, limit)
            own = {"max_tokens": limit} | ({} if sampling.seed is None else {"seed": _seed(sampling.seed, i)})
            requests.append(Request(prompt=prompt, options={**common, **own}))
        return requests

    def _check(self, number: int, prompt: Prompt, max_tokens: int) -> None:
        if prompt.videos:
            raise ValueError(
                f"prompt {number}: it has videos, which are not sent to vLLM; leave use_vllm=False for them "
                "(TransformersGenerator)"
            )
        limit = self.max_model_length
        if limit is not None and prompt.num_tokens + max_tokens > limit:
            raise ValueError(
                f"prompt {number}: it has {prompt.num_tokens} tokens ({prompt.num_image_tokens} of pictures), and with "
                f"{max_tokens} for the completion that is more than vLLM's context of {limit}; shorten it, or raise "
                "vllm_max_model_length"
            )

    def _options(self, sampling: SamplingParams, num_generations: int) -> dict[str, Any]:
        extra = dict(sampling.extra)
        stop_ids = () if extra.get("ignore_eos") else self.stop_ids
        bias = {str(k): v for k, v in extra.pop("logit_bias", {}).items()} | {str(i): -100.0 for i in self.bans.others}
        options: dict[str, Any] = {
            # Greedy completions are all the same, and vLLM makes no more than one.
            "n": num_generations if sampling.temperature > 0 else 1,
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "min_p": float(sampling.min_p),
            "repetition_penalty": float(sampling.repetition_penalty),
            "logprobs": 0,
            "stop_token_ids": sorted({*stop_ids, *extra.pop("stop_token_ids", ())}),
            "bad_words": [*self.bans.words, *extra.pop("bad_words", ())],
            "detokenize": "stop" in extra,
            **extra,
        }
        if bias:
            options["logit_bias"] = bias
        if self.regex is not None:
            options["structured_outputs"] = {"regex": self.regex}
        return options


def _seed(seed: int, number: int) -> int:
    """A seed for each prompt, far from the others': siblings get the seeds that follow it."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def truncates(sampling: SamplingParams) -> bool:
    """Whether log-probabilities are of a distribution that sampling has cut."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def output_of(
    requests: Sequence[Request],
    prompt_ids: Sequence[Sequence[int]],
    completions: Sequence[tuple[Completion, ...]],
    num_generations: int,
) -> GenerationOutput:
    """The generators' common result; it compares the ids that vLLM used with the encoded ones.

    Raises:
        ValueError: they differ.
    """
    for i, (request, used) in enumerate(zip(requests, prompt_ids, strict=True)):
        prompt = request.prompt
        if prompt.images and prompt.engine_ids != prompt.prompt_ids and tuple(used) != prompt.prompt_ids:
            raise ValueError(
                f"prompt {i}: the engine used {len(used)} ids that differ from the {prompt.num_tokens} encoded ones; "
                "its processor has other bounds for pictures than the run (min_pixels, max_pixels, or sizes of a "
                "picture's own): give `vlmroll serve` the same --min-pixels and --max-pixels, or choose sizes within "
                "the processor's own"
            )
    return GenerationOutput(
        prompts=tuple(request.prompt for request in requests),
        prompt_ids=tuple(tuple(ids) for ids in prompt_ids),
        completions=tuple(group if len(group) == num_generations else group * num_generations for group in completions),
    )
