"""Train a small model to use a calculator: it calls the tool, gets the result as text and answers.

    python examples/tools_text.py
    python examples/tools_text.py --algorithm rloo --generator vllm-colocate

Runs on a CPU without a network. The model in assets/ can call the calculator and copies what it returns, but often adds
where it should subtract or multiply; the reward is 1 for the right answer. Prints the accuracy on held-out pairs of
numbers before and after.
"""

import ast
import time

from shared import ALGORITHMS, GENERATORS, parse_options, print_result, rollout_accuracy
from tool_tasks import MAX_TOKENS, MODEL_DIR, answer_reward, make_calculator_rows, result

SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


def calculate(expression: str) -> int:
    """Compute a sum, a difference or a product of whole numbers.

    Args:
        expression: What to compute, such as 45+37.

    Returns:
        The result.
    """
    return value(ast.parse(expression, mode="eval").body)


def value(node: ast.expr) -> int:
    """What a parsed expression comes to; `ValueError` for anything but whole numbers and + - *."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
            return result(value(left), SIGNS[type(op)], value(right))
        case _:
            raise ValueError("use whole numbers and + - *")


def main() -> None:
    started = time.perf_counter()
    parser = parse_options(__doc__ or "", steps=100, output_dir="outputs/tools_text", choose_generator=True)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo", help="what trains")
    args = parser.parse_args()
    config_class, trainer_class = ALGORITHMS[args.algorithm]
    config = config_class(
        output_dir=args.output_dir,
        seed=args.seed,
        max_steps=args.steps,
        learning_rate=1e-4,
        beta=0.0,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=MAX_TOKENS,
        max_tool_calling_iterations=1,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        share_prompts=not args.dense,
        **GENERATORS[args.generator],
    )
    trainer = trainer_class(
        model=str(MODEL_DIR),
        reward_funcs=answer_reward,
        args=config,
        train_dataset=make_calculator_rows("train", 4096, seed=args.seed),
        tools=[calculate],
    )
    heldout = make_calculator_rows("heldout", 200, seed=0)
    before = rollout_accuracy(trainer, heldout, answer_reward, max_tokens=MAX_TOKENS)
    print(f"accuracy on held-out numbers before training: {before:.1%}")
    trainer.train()
    after = rollout_accuracy(trainer, heldout, answer_reward, max_tokens=MAX_TOKENS)
    print(f"accuracy on held-out numbers after training: {after:.1%}")
    print_result(started, args, accuracy_before=before, accuracy_after=after)


if __name__ == "__main__":
    main()
