"""GRPO in a loop of your own: adapter, generator, scoring and loss without a trainer.

    python examples/own_loop.py

The same task and model as grpo_multi_image.py. Each line of `train_step` is one call with one typed value.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForImageTextToText

from digits import MAX_TOKENS, MODEL_DIR, Row, accuracy_reward, make_rows
from shared import greedy_accuracy, parse_options, print_result
from vlmroll import Rollout, SamplingParams, TransformersGenerator, advantages, losses
from vlmroll.batches import make_batch
from vlmroll.scoring import policy_logprobs
from vlmroll_processors import load_adapter

GROUPS, GROUP_SIZE = 8, 8


class OwnLoop:
    """A policy with its optimizer, generator and adapter."""

    def __init__(self, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.model: Any = AutoModelForImageTextToText.from_pretrained(MODEL_DIR, dtype=torch.float32)
        self.adapter = load_adapter(MODEL_DIR)
        self.generator = TransformersGenerator(self.model, self.adapter)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)

    def collect(self, rows: list[Row], step: int) -> list[Rollout]:
        """Sample a group for each row, reward it, and compare the siblings."""
        prompts = self.adapter.encode(rows)
        sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=self.seed * 100_000 + step)
        output = self.generator.generate(prompts, sampling, GROUP_SIZE)
        rollouts = [
            Rollout(prompt=prompt, completion=completion, row=row, row_id=group, group=group)
            for group, (row, prompt, siblings) in enumerate(zip(rows, prompts, output.completions, strict=True))
            for completion in siblings
        ]
        texts = [[{"role": "assistant", "content": self.adapter.decode(ids)}] for ids in output.completion_ids]
        rewards = torch.tensor(accuracy_reward(texts, [rollout.row["answer"] for rollout in rollouts]))
        scaled = advantages.group_normalised(rewards, GROUP_SIZE).tolist()
        weights = losses.token_weights("dapo", [len(ids) for ids in output.completion_ids], sampling.max_tokens)
        return [
            replace(rollout, reward=reward, advantage=advantage, loss_weight=weight)
            for rollout, reward, advantage, weight in zip(rollouts, rewards.tolist(), scaled, weights, strict=True)
        ]

    def train_step(self, rows: list[Row], step: int) -> float:
        """One optimizer step on fresh rollouts; the mean reward."""
        rollouts = self.collect(rows, step)
        batch = make_batch(rollouts, pad_token_id=self.adapter.pad_token_id, device="cpu")
        self.model.train()
        scores = policy_logprobs(self.model, batch.inputs, banned_ids=sorted(self.adapter.vision_ids))
        ratio = losses.importance_ratio(scores.logprobs, scores.logprobs.detach(), batch.loss_mask)
        term = losses.clipped_surrogate(ratio, batch.advantages, epsilon=0.2, epsilon_high=0.2)
        (term.loss * batch.loss_mask * batch.loss_weights[:, None]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(rollout.reward for rollout in rollouts) / len(rollouts)


def main() -> None:
    started = time.perf_counter()
    parser = parse_options(__doc__ or "", steps=120, output_dir="outputs/own_loop")
    args = parser.parse_args()
    loop = OwnLoop(learning_rate=5e-5, seed=args.seed)
    rows, heldout = make_rows("train", args.steps * GROUPS, seed=args.seed), make_rows("heldout", 200, seed=0)
    before = greedy_accuracy(loop.generator, loop.adapter, heldout)
    progress = tqdm(range(args.steps))
    for step in progress:
        reward = loop.train_step(rows[step * GROUPS : (step + 1) * GROUPS], step)
        progress.set_postfix(reward=f"{reward:.2f}")
    after = greedy_accuracy(loop.generator, loop.adapter, heldout)
    loop.model.save_pretrained(args.output_dir)
    print_result(started, args, accuracy_before=before, accuracy_after=after)


if __name__ == "__main__":
    main()
