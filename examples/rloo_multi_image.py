"""Train a small vision-language model with RLOO on questions about several pictures of handwritten digits.

    python examples/rloo_multi_image.py
    python examples/rloo_multi_image.py --generator vllm-colocate

Runs on a CPU without a network. The model in assets/ can see digits but chooses badly; the reward is 1 for a right
answer. Prints the accuracy on held-out digits before and after.
"""

import time

from digits import MAX_TOKENS, MODEL_DIR, accuracy_reward, make_rows
from shared import GENERATORS, greedy_accuracy, parse_options, print_result
from vlmroll import RLOOConfig, RLOOTrainer


def main() -> None:
    started = time.perf_counter()
    args = parse_options(
        __doc__ or "", steps=120, output_dir="outputs/rloo_multi_image", choose_generator=True
    ).parse_args()
    config = RLOOConfig(
        output_dir=args.output_dir,
        seed=args.seed,
        max_steps=args.steps,
        learning_rate=5e-5,
        per_device_train_batch_size=64,
        num_generations=8,
        beta=0.0,
        max_completion_length=MAX_TOKENS,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        share_prompts=not args.dense,
        **GENERATORS[args.generator],
    )
    trainer = RLOOTrainer(
        model=str(MODEL_DIR),
        reward_funcs=accuracy_reward,
        args=config,
        train_dataset=make_rows("train", 4096, seed=args.seed),
    )
    heldout = make_rows("heldout", 200, seed=0)
    before = greedy_accuracy(trainer.generator, trainer.adapter, heldout)
    print(f"accuracy on held-out digits before training: {before:.1%}")
    trainer.train()
    after = greedy_accuracy(trainer.generator, trainer.adapter, heldout)
    print(f"accuracy on held-out digits after training: {after:.1%}")
    print_result(started, args, accuracy_before=before, accuracy_after=after)


if __name__ == "__main__":
    main()
