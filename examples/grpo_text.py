"""Train a text model with GRPO to use many different characters: the reward is their number.

    python examples/grpo_text.py
    python examples/grpo_text.py --model Qwen/Qwen3-0.6B-Base --dataset trl-lib/tldr --max-completion-length 64

By default on a tiny model with random weights and on prompts made here, offline; with a model and a dataset from the
hub it is a small benchmark whose reward goes up in few steps.
"""

import time
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from digits import MODEL_DIR
from shared import GENERATORS, parse_options, print_result
from vlmroll import GRPOConfig, GRPOTrainer

TOPICS = ("rain", "a red bus", "seven ducks", "the sea", "old maps", "a quiet street", "bread", "the night train")


def distinct_characters(completions: list[Any]) -> list[float]:
    """The number of different characters of each completion."""
    return [float(len(set(c if isinstance(c, str) else c[0]["content"]))) for c in completions]


def tiny_model(seed: int) -> tuple[Any, Any]:
    """A text model of 0.4 million random weights, and a tokenizer for it."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config), tokenizer


def prompts(dataset: str | None) -> Any:
    """Rows with the column `prompt`: of a hub dataset, or made here."""
    if dataset is not None:
        from datasets import load_dataset

        return load_dataset(dataset, split="train")
    return [{"prompt": f"Write {n} words about {topic}: "} for n in range(2, 34) for topic in TOPICS]


def mean_reward(trainer: GRPOTrainer) -> float:
    """Mean reward of sampled completions of the evaluation prompts."""
    return trainer.evaluate()["eval_reward"]


def main() -> None:
    started = time.perf_counter()
    parser = parse_options(__doc__ or "", steps=60, output_dir="outputs/grpo_text", choose_generator=True)
    parser.add_argument("--model", default=None, help="hub id or path; default: a tiny random model")
    parser.add_argument("--dataset", default=None, help="hub id with a column `prompt`; default: prompts made here")
    parser.add_argument("--learning-rate", type=float, default=None, help="default: 1e-3 (tiny model) or 1e-5")
    parser.add_argument("--max-completion-length", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32, help="completions of a step, 8 for each prompt")
    args = parser.parse_args()
    model, tokenizer = (args.model, None) if args.model else tiny_model(args.seed)
    rows = prompts(args.dataset)
    config = GRPOConfig(
        output_dir=args.output_dir,
        seed=args.seed,
        max_steps=args.steps,
        learning_rate=args.learning_rate or (1e-5 if args.model else 1e-3),
        lr_scheduler_type="constant",
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        num_generations=8,
        max_completion_length=args.max_completion_length,
        gradient_checkpointing=bool(args.model),
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        share_prompts=not args.dense,
        **GENERATORS[args.generator],
    )
    evaluation = rows[:16] if isinstance(rows, list) else rows.select(range(16))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=distinct_characters,
        args=config,
        train_dataset=rows,
        eval_dataset=evaluation,
        processing_class=tokenizer,
    )
    before = mean_reward(trainer)
    trainer.train()
    after = mean_reward(trainer)
    if args.model:
        trainer.save_model()
    print_result(started, args, reward_before=before, reward_after=after)


if __name__ == "__main__":
    main()
