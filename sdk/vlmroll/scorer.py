"""How a trainer scores rollouts: joined to tensors, through the wrapped model, against the engine that sampled them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vlmroll.attention import switch_on
from vlmroll.batches import join_rollouts, make_batch
from vlmroll.config import PolicyConfig
from vlmroll.mismatch import difference, truncation_of
from vlmroll.modeling import call_through, eval_mode, numbers_of_a_patch
from vlmroll.planning import Budget
from vlmroll.scoring import Scores, check_head, policy_logprobs
from vlmroll.sharing import Sharing
from vlmroll.types import Batch, Rollout
from vlmroll.vision import VisionFeatures
from vlmroll_processors import PackedBatch, PaddedBatch, ProcessorAdapter


class Scorer:
    """Scores rollouts under a model.

    Args:
        accelerator: of the trainer.
        args: its options.
        adapter: encoded the prompts.
        generator: sampled the completions.
    """

    def __init__(self, accelerator: Any, args: PolicyConfig, adapter: ProcessorAdapter, generator: Any) -> None:
        self._accelerator, self._args, self._generator = accelerator, args, generator
        self._banned = sorted(generator.banned_ids)
        self._options: dict[str, Any] = {
            "pad_token_id": adapter.pad_token_id,
            "device": accelerator.device,
            "pad_to_multiple_of": args.pad_to_multiple_of,
        }
        self._sharing = Sharing(self._joined, wanted=args.share_prompts)
        self._vision = VisionFeatures()
        self._head_checked = False

    def budget(self, model: Any, rollouts: Sequence[Rollout]) -> Budget:
        """What may go through the model together of some rollouts."""
        args = self._args
        return Budget(
            completions=args.per_device_train_batch_size,
            tokens=args.micro_batch_max_tokens,
            patches=args.micro_batch_max_patches,
            patch_size=numbers_of_a_patch(self._accelerator.unwrap_model(model).config),
            shared=bool(rollouts) and self._shares(model, rollouts),
        )

    def batch(self, model: Any, rollouts: Sequence[Rollout]) -> Batch:
        """The tensors of a micro-batch."""
        return make_batch(rollouts, **self._options, packed=self._shares(model, rollouts))

    def join(self, model: Any, rollouts: Sequence[Rollout]) -> PaddedBatch | PackedBatch:
        """The model's inputs of a micro-batch alone."""
        return self._joined(rollouts, self._shares(model, rollouts))

    def _joined(self, rollouts: Sequence[Rollout], packed: bool) -> PaddedBatch | PackedBatch:
        return join_rollouts(rollouts, **self._options, packed=packed)

    def _shares(self, model: Any, rollouts: Sequence[Rollout]) -> bool:
        # The model itself, not its wrapper: other processes may have nothing to try.
        inner = self._accelerator.unwrap_model(model)
        return self._sharing.applies(inner, rollouts, partial(self._compared, inner))

    def _compared(self, inner: Any, inputs: PaddedBatch | PackedBatch) -> torch.Tensor:
        """Log-probabilities in the weights' own precision: autocast would round away what a comparison is to show."""
        device = self._accelerator.device.type
        with torch.no_grad(), eval_mode(inner), torch.autocast(device, enabled=False):
            return self._scored(inner, inputs).logprobs

    def gap(self, rows: Sequence[Rollout], scores: Scores) -> torch.Tensor | None:
        """See `mismatch.difference`; None where the policy itself samples."""
        engine = getattr(self._generator, "has_mismatch", False)
        return difference(rows, scores.logprobs, scores.truncated) if engine else None

    def score(
        self,
        model: Any,
        inputs: PaddedBatch | PackedBatch,
        *,
        rows: Sequence[Rollout] = (),
        entropy: bool = False,
    ) -> Scores:
        """Scores of the completions under a model, in the precision of training.

        Args:
            rows: the rollouts of `inputs`, where their scores are held against the engine's.
            entropy: also of the distributions.
        """
        args, inner = self._args, self._accelerator.unwrap_model(model)
        truncation = truncation_of(rows, min_p=args.min_p, top_k=args.top_k, top_p=args.top_p)
        work = partial(self._scored, inner, inputs, with_entropy=entropy, truncation=truncation)
        with self._accelerator.autocast():
            return call_through(model, inner, work)

    def _scored(self, inner: Any, inputs: PaddedBatch | PackedBatch, **more: Any) -> Scores:
        if isinstance(inputs, PackedBatch):
            switch_on(inner)  # a reference may be a copy from before the policy was switched
        elif not self._head_checked:
            check_head(inner, inputs)
            self._head_checked = True
        return policy_logprobs(
            inner,
            inputs,
            temperature=self._args.temperature,
            banned_ids=self._banned,
            chunk_size=self._args.logprob_chunk_size,
            vision=self._vision,
            **more,
        )

    def frozen(self, model: Any, inputs: PaddedBatch | PackedBatch, **more: Any) -> Scores:
        """The same without gradient, in eval mode."""
        with torch.no_grad(), eval_mode(model):
            return self.score(model, inputs, **more)
