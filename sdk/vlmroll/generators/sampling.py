"""Which token comes next: transformers' own logits processors, chosen by `SamplingParams`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from transformers.generation import logits_process as hf

from vlmroll.types import SamplingParams

Logits = Float[torch.Tensor, "R V"]

# Option of transformers' GenerationConfig -> its processor, in the order in which transformers applies them.
# The arguments are the option's value, the stop ids, the prompt's padded length and the device.
_EXTRA: Mapping[str, Callable[[Any, list[int], int, str], Any]] = {
    "no_repeat_ngram_size": lambda value, stop, length, device: hf.NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, stop, length, device: hf.NoBadWordsLogitsProcessor(value, stop),
    "min_new_tokens": lambda value, stop, length, device: hf.MinNewTokensLengthLogitsProcessor(
        length, value, stop, device=device
    ),
    "suppress_tokens": lambda value, stop, length, device: hf.SuppressTokensLogitsProcessor(value, device=device),
    "typical_p": lambda value, stop, length, device: hf.TypicalLogitsWarper(value),
    "epsilon_cutoff": lambda value, stop, length, device: hf.EpsilonLogitsWarper(value),
    "eta_cutoff": lambda value, stop, length, device: hf.EtaLogitsWarper(value, device=device),
}
_OFF: Mapping[str, float] = {"typical_p": 1.0}  # the other options are off at 0, all of them at None
_HISTORY = ("no_repeat_ngram_size",)
_BEFORE_TEMPERATURE = ("bad_words_ids", "min_new_tokens", "suppress_tokens")


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse what this generator cannot do.

    Raises:
        ValueError: names the option and the ones that work.
    """
    for name in extra:
        if name not in _EXTRA:
            raise ValueError(f"generation_kwargs: {name!r} is not offered by this generator; it takes {sorted(_EXTRA)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Warper:
    """Turns logits into the logits to sample from.

    Attributes:
        history: processors that read a row's own tokens; they are called row by row, without the padding, so that a
            row does not depend on its neighbours' lengths.
        rest: the others, called on all rows at once.
    """

    history: hf.LogitsProcessorList
    rest: hf.LogitsProcessorList

    def __call__(self, ids: Int[torch.Tensor, "R T"], mask: Int[torch.Tensor, "R T"], logits: Logits) -> Logits:
        """The logits to sample from; `mask` is 1 on the rows' own tokens."""
        if self.history:
            own: Any = [(ids[i : i + 1, mask[i].bool()], logits[i : i + 1]) for i in range(len(ids))]
            logits = torch.cat([self.history(row_ids, row_logits) for row_ids, row_logits in own])
        rest: Any = self.rest
        return rest(ids, logits)


def processors(sampling: SamplingParams, stop_ids: list[int], prompt_length: int, device: str) -> Warper:
    """The processors of transformers that `sampling` asks for, in the order in which transformers applies them.

    At temperature 0, where the most likely token is taken, nothing is truncated.

    Args:
        prompt_length: length of the padded prompts, P.
    """
    check_extra(sampling.extra)
    history, chosen = hf.LogitsProcessorList(), hf.LogitsProcessorList()
    warper = Warper(history=history, rest=chosen)
    if sampling.repetition_penalty != 1.0:
        history.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    extra = {
        name: _EXTRA[name](value, stop_ids, prompt_length, device)
        for name, value in sampling.extra.items()
        if value is not None and value != _OFF.get(name, 0)
    }
    history.extend(extra[name] for name in _HISTORY if name in extra)
    chosen.extend(extra[name] for name in _BEFORE_TEMPERATURE if name in extra)
    if sampling.temperature == 0.0:
        return warper
    if sampling.temperature != 1.0:
        chosen.append(hf.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        chosen.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chosen.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chosen.append(hf.MinPLogitsWarper(sampling.min_p))
    chosen.extend(extra[name] for name in _EXTRA if name in extra and name not in (*_HISTORY, *_BEFORE_TEMPERATURE))
    return warper


def draw(logits: Logits, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """[R] one token for each row: the most likely at temperature 0, else a sample."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
