"""Options of generation: how many completions a round has, and how their tokens are sampled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from .options import option, refuse, require, require_dict

_OWN_OPTION: Mapping[str, str] = {
    **{
        name: f"write it as an option of its own, {name}=..."
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")
    },
    "max_new_tokens": "write max_completion_length=...",
    "max_length": "write max_completion_length=..., which counts the completion alone",
    "max_tokens": "write max_completion_length=...",
    "num_return_sequences": "write num_generations=...",
    "n": "write num_generations=...",
    "do_sample": "completions are always sampled, leave it out",
    "num_beams": "completions are always sampled, and beams are not; leave it out",
}
"""Keys that `generation_kwargs` must not hold: the loss has to know these values, and reads them from the options."""


@dataclass(repr=False)
class GenerationOptions:
    """How many completions there are, and how they are sampled.

    One round makes `generation_batch_size` completions over all processes, `num_generations` for each prompt, and is
    trained on for `steps_per_generation` micro-steps, `num_iterations` times.

    `GRPOConfig(num_generations=4, per_device_train_batch_size=8, temperature=0.9, max_completion_length=256)`
    """

    num_generations: int = option(8, help="Completions of each prompt (the size of a group), at least 2.")
    num_generations_eval: int | None = option(
        None, help="Completions of each prompt in evaluation, at least 1. None: as in training."
    )
    max_completion_length: int = option(
        512, help="Most tokens that a completion may have, over all turns, with what tools return."
    )
    generation_batch_size: int | None = option(
        None,
        help="Completions of one generation round over all processes. None: per_device_train_batch_size times "
        "processes times steps_per_generation. Set this or steps_per_generation.",
    )
    steps_per_generation: int | None = option(
        None,
        help="Micro-steps that one generation round lasts. None: gradient_accumulation_steps, a round for each "
        "optimizer step.",
    )
    shuffle_dataset: bool = option(
        True,
        help="Draw the training rows in a new random order in each epoch. A stream keeps its own order: shuffle it "
        "with its own method.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, help="Keyword arguments for the chat template of the tokenizer or processor."
    )
    max_tool_calling_iterations: int | None = option(
        None, help="Most turns of a completion whose tool calls are run. None: as many as fit max_completion_length."
    )
    tool_timeout: float | None = option(
        30.0,
        help="Seconds that a tool call may take; one that takes longer ends in an error message for the model. Also of "
        "an environment's reset and get_reward, where it ends the run. None: no limit.",
        new=True,
    )
    tool_call_format: str | None = option(
        None,
        help="How the model writes tool calls, where neither the tokenizer's response template nor its chat template "
        "tells: a name of vlmroll.tools.FORMATS.",
        new=True,
    )
    temperature: float = option(1.0, help="Logits are divided by this before sampling; above 1 is more random.")
    top_p: float = option(1.0, help="Sample from the likeliest tokens that reach this total probability. 1: all.")
    top_k: int | None = option(0, help="Sample from this many likeliest tokens. 0 or None: all.")
    min_p: float | None = option(
        None, help="Leave out tokens less likely than this share of the likeliest token's probability."
    )
    repetition_penalty: float = option(
        1.0, help="Above 1 makes tokens less likely that the prompt or completion already has; 1 changes nothing."
    )
    generation_kwargs: dict[str, Any] | str | None = option(
        None,
        help="Further settings of the generator, by their names in transformers.GenerationConfig: "
        "no_repeat_ngram_size, bad_words_ids, min_new_tokens, suppress_tokens, typical_p, epsilon_cutoff, eta_cutoff. "
        "Settings that are options themselves are not taken from here.",
    )
    cache_implementation: str | None = option(
        None, help="Kind of key-value cache in generation.", refused="it is not offered yet; leave it out"
    )
    use_transformers_continuous_batching: bool = option(
        False,
        help="Generate with the continuous batching of transformers, which packs prompts and completions of any length "
        "without padding. For rows without pictures.",
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = option(
        None,
        help="Settings of that engine, by their names in transformers.ContinuousBatchingConfig. Without num_blocks its "
        "cache has room for a round's completions, at most for 65,536 tokens at a time.",
    )

    def check_generation(self) -> None:
        """Raise ValueError for a generation option out of range; `top_k=None` becomes 0."""
        require(
            self.num_generations >= 2,
            "num_generations",
            self.num_generations,
            "it must be at least 2, because a completion is compared with the others of its group",
        )
        per_eval, length = self.num_generations_eval, self.max_completion_length
        require(per_eval is None or per_eval >= 1, "num_generations_eval", per_eval, "it must be at least 1, or None")
        require(bool(length and length >= 1), "max_completion_length", length, "it must be at least 1 token")
        require_dict("chat_template_kwargs", self.chat_template_kwargs)
        most, seconds = self.max_tool_calling_iterations, self.tool_timeout
        require(most is None or most >= 1, "max_tool_calling_iterations", most, "it must be at least 1, or None")
        require(seconds is None or 0 < seconds < math.inf, "tool_timeout", seconds, "it must be above 0 s, or None")
        self._check_sampling()
        self._check_continuous_batching()

    def _check_sampling(self) -> None:
        hot, top_p, min_p, penalty = self.temperature, self.top_p, self.min_p, self.repetition_penalty
        require(math.isfinite(hot), "temperature", hot, "it must be finite")
        require(hot > 0, "temperature", hot, "it must be greater than 0; at 0 all completions of a group are the same")
        require(0 < top_p <= 1, "top_p", top_p, "it must be greater than 0 and at most 1 (1: all tokens)")
        require(min_p is None or 0 <= min_p <= 1, "min_p", min_p, "it must be from 0 to 1, or None")
        require(penalty > 0, "repetition_penalty", penalty, "it must be greater than 0 (1: no penalty)")
        self.top_k = 0 if self.top_k is None else self.top_k
        require(self.top_k >= 0, "top_k", self.top_k, "it must be at least 0 (0 or None: all tokens)")
        require_dict("generation_kwargs", self.generation_kwargs)
        for key in self.generation_kwargs or ():
            if key in _OWN_OPTION:
                refuse("generation_kwargs", self.generation_kwargs, f"{key!r}: {_OWN_OPTION[key]}")

    def _check_continuous_batching(self) -> None:
        settings = self.transformers_continuous_batching_config
        require_dict("transformers_continuous_batching_config", settings)
        if settings is None:
            return
        rule = "nothing reads it; set use_transformers_continuous_batching=True too, or leave it out"
        require(self.use_transformers_continuous_batching, "transformers_continuous_batching_config", settings, rule)
        from vlmroll.generators.continuous_engine import check_engine_config  # it loads the engine

        check_engine_config(cast("dict[str, Any]", settings))

    def generations_per_prompt(self, *, evaluating: bool) -> int:
        """Size of a group in training or in evaluation."""
        return self.num_generations_eval if evaluating and self.num_generations_eval else self.num_generations
