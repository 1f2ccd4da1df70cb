"""The trainer of policies. `GRPOTrainer` and `RLOOTrainer` are thin pages over it.

    rows --open_shares--> Start --episodes.run--> Rollout --rewards.score--> Rollout --rescore--> Rollout
        --advantages--> Rollout --make_batch--> Batch --policy_logprobs--> logprobs --loss-->

`collect` is the first line, one round of generation; `compute_loss` is the second, one micro-batch of it. In between
the rollouts are a list, which the loop (`vlmroll.loop`) cuts; each knows its share in the loss of the whole optimizer
step, so the cut never changes the gradient.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import gather_object

from vlmroll import engines, losses, reporting, rollouts, setup, starts
from vlmroll.advantages import zero_variance
from vlmroll.completions import table_rows
from vlmroll.config import PolicyConfig
from vlmroll.episodes import environments_of
from vlmroll.generators import Generator
from vlmroll.interaction import Asked, make_interaction, reward_suite
from vlmroll.loop import RoundTrainer
from vlmroll.losses import PolicyTerm
from vlmroll.metrics import Metrics
from vlmroll.mismatch import importance_weights
from vlmroll.planning import plan, warn_of_large
from vlmroll.scorer import Scorer
from vlmroll.types import Batch, Rollout, SamplingParams
from vlmroll_processors.types import Row

logger = logging.getLogger(__name__)


class PolicyTrainer(RoundTrainer):
    """What GRPO and RLOO share. A subclass gives `compute_advantages` and `policy_term`.

    Args:
        model: a hub id, a path, a model of transformers, or a PEFT model.
        reward_funcs: functions, hub ids of sequence-classification models, or such models; one or a list.
        args: the options.
        train_dataset, eval_dataset: rows with the column `prompt`, and `image` or `images` where there are pictures: a
            dataset of `datasets`, a stream, or a list of rows.
        processing_class: processor, tokenizer, or what `load_adapter` returns; by default the one saved with the model.
        reward_processing_classes: tokenizers of the reward models.
        callbacks, optimizers: as in `transformers.Trainer`.
        peft_config: makes an adapter that is trained in the model's place.
        generator: samples the completions; by default the policy itself does.
        tools: functions with type hints and Google-style docstrings, sync or async, that the model may call.
        environment_factory: makes an environment for each rollout: an object with `reset(**row)`, methods that the
            model may call, and perhaps `get_reward()` and `close()`. A dict of factories is chosen from by the rows'
            column `environment`.
        rollout_func: makes the completions in the place of generator and tools, see `vlmroll.own_rollouts`.

    Raises:
        ValueError, TypeError: options, rows or rewards that cannot work, named with the fix.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    kl_in_loss: ClassVar[bool] = True

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: PolicyConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        peft_config: Any = None,
        generator: Generator | None = None,
        tools: Any = None,
        environment_factory: Any = None,
        rollout_func: Any = None,
        **others: Any,
    ) -> None:
        name = type(self).__name__
        setup.refuse_options(name, others, list(signature(PolicyTrainer).parameters))
        args = self.config_class() if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(f"{name} takes args of {self.config_class.__name__}, got {type(args).__name__}")
        for role, rows in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            setup.check_rows(role, rows)
        if generator is not None and not isinstance(cast("object", generator), Generator):
            raise TypeError(f"{name}: generator is {generator!r}; it needs generate, sync_weights, close, banned_ids")
        engines.check_options(args, generator)
        asked = Asked(tools=tools, environment_factory=environment_factory, rollout_func=rollout_func)
        asked.close_with(self)
        parts = setup.prepare(model, args, processing_class, peft_config)
        self.adapter, self.reference = parts.adapter, parts.reference
        functions = setup.reward_functions(reward_funcs, reward_processing_classes, args)
        self.generator = engines.make_generator(parts.model, parts.adapter, args) if generator is None else generator
        limits = (setup.context_length(parts.model), getattr(self.generator, "max_model_length", None))
        self._context = min((limit for limit in limits if limit is not None), default=None)
        super().__init__(
            model=parts.model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=parts.adapter.processor,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.interaction = make_interaction(asked, parts.adapter, self.generator, self)
        self.rewards = reward_suite(functions, args, self.interaction.pool)
        self._told_large: set[int] = set()
        self.scorer = Scorer(self.accelerator, args, parts.adapter, self.generator)
        if parts.adapter.family.inferred:
            setup.check_family(parts.model, parts.adapter)

    def compute_advantages(self, rewards: torch.Tensor, kl: torch.Tensor, num_generations: int) -> torch.Tensor:
        """Advantages [N] of a round from its rewards [N, F] and the KL of each completion to the reference [N]."""
        raise NotImplementedError("an algorithm gives this; use GRPOTrainer or RLOOTrainer, or write your own")

    def policy_term(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyTerm:
        """The objective's loss for each token or row, without KL."""
        raise NotImplementedError("an algorithm gives this; use GRPOTrainer or RLOOTrainer, or write your own")

    # A round: rows to rollouts.

    def collect(self, rows: Sequence[Row], row_ids: Sequence[int], seed: tuple[Any, ...], mode: str) -> list[Rollout]:
        """This process's rollouts of one round, ready to train on."""
        try:
            return self._collect(rows, row_ids, seed, mode)
        finally:
            self.interaction.opener.release()

    def _collect(self, rows: Sequence[Row], row_ids: Sequence[int], seed: tuple[Any, ...], mode: str) -> list[Rollout]:
        metrics = self.metrics[mode]
        num_generations = self.args.generations_per_prompt(evaluating=mode == "eval")
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        shares = starts.share_of(len(rows), num_generations, rank, world_size)
        with metrics.timed("encode"):
            skip, opener = self.args.long_prompts == "skip", self.interaction.opener
            opened = starts.open_shares(opener, rows, row_ids, shares, skip=skip, replace=mode == "train")
        metrics.add("sum", "prompts/num_skipped", float(opened.num_skipped))
        if skip and not any(gather_object([len(opened.shares)])):
            return []
        with metrics.timed(getattr(self.generator, "metric_name", "generate")):
            found = self._run(opened, self._sampling(*seed))
        texts = [self.adapter.decode(rollout.completion.completion_ids) for rollout in found]
        with metrics.timed("_calculate_rewards"):
            places = environments_of(opened) if self.interaction.pool else None
            found = self.rewards.score(found, texts, self.state, metrics, environments=places)
        if self.args.mask_truncated_completions:
            found = rollouts.leave_out(found, [r.completion.finish_reason == "length" for r in found])
        with metrics.timed("_get_per_token_logps_and_entropies"):
            found = self._rescore(found)
        found = self._with_advantages(found, num_generations, metrics)
        self._report(found, texts, mode)
        return found

    def roll_out(
        self, rows: Sequence[Row], sampling: SamplingParams | None = None, num_generations: int = 1
    ) -> list[Rollout]:
        """Completions of rows, siblings side by side, with tools and environments as in training, without rewards.

        Args:
            rows: as in the dataset.
            sampling: by default that of training; `max_tokens` counts all turns.

        Example:
            >>> found = trainer.roll_out(rows[:8], SamplingParams(temperature=0.0, max_tokens=64))  # doctest: +SKIP
            >>> found[0].completion.turns.messages  # doctest: +SKIP
        """
        shares = starts.share_of(len(rows), num_generations, rank=0, world_size=1)
        try:
            opened = starts.open_shares(self.interaction.opener, rows, range(len(rows)), shares)
            return self._run(opened, self._sampling("roll_out") if sampling is None else sampling)
        finally:
            self.interaction.opener.release()

    def _run(self, opened: starts.Opened, sampling: SamplingParams) -> list[Rollout]:
        starts.check_lengths(opened, sampling.max_tokens, self._context)
        # An engine of its own has its own precision.
        own = getattr(self.generator, "has_mismatch", False)
        with contextlib.nullcontext() if own else self.accelerator.autocast():
            return self.interaction.episodes.run(opened, sampling, gather_object)

    def _sampling(self, *seed: Any) -> SamplingParams:
        return engines.sampling_of(self.args, setup.derive_seed(self.args.seed, *seed, self.accelerator.process_index))

    def _rescore(self, found: list[Rollout]) -> list[Rollout]:
        """Score under the policy as it is now and under the reference, where the objective needs it.

        The policy's scores are not needed when every micro-batch of the round is trained on before the weights change:
        then they are what the training pass itself computes.
        """
        args = self.args
        assert args.steps_per_generation is not None
        period = args.steps_per_generation * args.num_iterations
        entropy = args.top_entropy_quantile < 1
        kl_in_reward = self.reference is not None and not self.kl_in_loss
        policy = entropy or kl_in_reward or args.gradient_accumulation_steps % period != 0
        if not policy and self.reference is None:
            return found
        scorer = self.scorer

        def score(chunk: Sequence[Rollout]) -> dict[str, torch.Tensor | None]:
            inputs = scorer.join(self.model, chunk)
            result: dict[str, torch.Tensor | None] = {}
            if policy:
                scores = scorer.frozen(self.model, inputs, rows=chunk, entropy=entropy)
                result = {"old_logprobs": scores.logprobs, "entropies": scores.entropies}
                result["mismatch"] = scorer.gap(chunk, scores)
            if self.reference is not None:
                with self.reference.using() as model:
                    result["ref_logprobs"] = scorer.frozen(model, inputs).logprobs
            return result

        return rollouts.rescored(self.cut(found), score)

    def _with_advantages(self, found: Sequence[Rollout], num_generations: int, metrics: Metrics) -> list[Rollout]:
        """Rewards of all processes to advantages; this process's part of them goes into its rollouts."""
        kl = [rollouts.sequence_kl(rollout) for rollout in found]
        mine = [[float("nan") if value is None else value for value in r.rewards.values()] for r in found]
        everyone: list[tuple[list[list[float]], list[float]]] = gather_object([(mine, kl)])
        # Double precision: rewards such as 1e8 + 1 differ from their neighbours by less than float32 can tell.
        each = torch.tensor([row for part, _ in everyone for row in part], dtype=torch.float64)
        all_kl = torch.tensor([value for _, part in everyone for value in part], dtype=torch.float64)
        total = self.rewards.total(each)
        if total.isnan().all():
            logger.warning(
                "no reward function scored any of the %d completions: nothing is learned from them", len(total)
            )
        advantages = self.compute_advantages(each, all_kl, num_generations)
        reporting.report_rewards(metrics, self.rewards.names, each, total, num_generations)
        first = sum(len(part) for part, _ in everyone[: self.accelerator.process_index])
        here = slice(first, first + len(found))
        if self.args.drop_zero_variance_groups:
            found = rollouts.leave_out(found, zero_variance(total, num_generations)[here].tolist())
        return rollouts.with_advantages(found, total[here], advantages[here])

    def _report(self, found: Sequence[Rollout], texts: Sequence[str], mode: str) -> None:
        metrics = self.metrics[mode]
        reporting.report_rollouts(metrics, found, kl=not self.kl_in_loss)
        tokens = sum(rollout.prompt.num_tokens + len(rollout.completion.completion_ids) for rollout in found)
        if mode == "train":
            self.state.num_input_tokens_seen += sum(gather_object([tokens]))
        extras = metrics.take_columns()
        if self.args.log_completions:
            rows = table_rows(found, texts, extras, with_images=self.args.log_multimodal)
            # Of training the last round is shown, of evaluation all rows.
            self.table[mode] = rows if mode == "train" else self.table[mode] + rows

    # A micro-batch: rollouts to loss.

    def cut(self, found: Sequence[Rollout]) -> list[list[Rollout]]:
        """Pieces of rollouts that go through the model together, groups whole where the budgets allow."""
        budget = self.scorer.budget(self.model, found)
        pieces = plan(found, budget)
        warn_of_large(pieces, budget, self._told_large)
        return pieces

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The share of some rollouts in the loss of the optimizer step."""
        if return_outputs:
            raise ValueError("a policy's loss comes without model outputs; call policy_logprobs for them")
        args, metrics = self.args, self.metrics["train" if model.training else "eval"]
        started = time.perf_counter()
        batch = self.scorer.batch(model, inputs)
        scores = self.scorer.score(model, batch.inputs, rows=inputs, entropy=True)
        left_out = batch.loss_mask == 0
        # What does not count is set to 0 before any arithmetic: an infinite value times 0 would be NaN.
        logprobs = scores.logprobs.masked_fill(left_out, 0.0)
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs.masked_fill(left_out, 0)
        term = self.policy_term(logprobs, old_logprobs, batch)
        per_token = term.loss if batch.entropy_mask is None else term.loss * batch.entropy_mask
        gap = self.scorer.gap(inputs, scores) if batch.old_logprobs is None else batch.mismatch
        if gap is not None:
            weights = importance_weights(gap, batch.loss_mask, **args.mismatch_bounds)
            per_token = per_token * weights if args.vllm_importance_sampling_correction else per_token
            reporting.report_mismatch(metrics, inputs, batch.loss_mask, gap, weights)
        extras = {} if scores.entropies is None else {"entropy": scores.entropies}
        if self.kl_in_loss and batch.ref_logprobs is not None:
            kl = losses.k3_kl(logprobs, batch.ref_logprobs.masked_fill(left_out, 0))
            kl = kl * term.ratio if args.use_bias_correction_kl else kl
            per_token = per_token + args.beta * kl
            extras["kl"] = kl
        loss = (per_token * batch.loss_mask * batch.loss_weights[:, None]).sum()
        reporting.report_loss(metrics, term, batch, self.ratio_bounds(), extras)
        metrics.add_time("compute_loss", time.perf_counter() - started)
        return loss * self.accelerator.num_processes  # data-parallel wrappers average over processes

    def ratio_bounds(self) -> reporting.Bounds:
        """The ratios below and above which the objective clips."""
        low, high = self.args.clip_range
        return 1 - low, 1 + high
