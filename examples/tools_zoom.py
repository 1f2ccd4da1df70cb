"""Train a small vision-language model to look closer: it asks for a part of a picture, sees it and answers.

    python examples/tools_zoom.py
    python examples/tools_zoom.py --algorithm rloo --generator vllm-colocate

Runs on a CPU without a network. A picture shows four digits and a question asks for one; the model gets too few pixels
to read it, but sees where the digits are, and may call `zoom` once. The model in assets/ can call it and reads what
it returns, but often looks at the wrong place; the reward is 1 for the right digit. Prints the accuracy on held-out
digits before and after.
"""

import time
from typing import Any

from PIL import Image

from shared import ALGORITHMS, GENERATORS, parse_options, print_result, rollout_accuracy
from tool_tasks import MAX_PIXELS, MAX_TOKENS, MODEL_DIR, answer_reward, close_up, make_zoom_rows


class Zoom:
    """The environment of a rollout: it keeps the picture in all its pixels, and shows parts of it."""

    def __init__(self) -> None:
        self._picture: Image.Image | None = None

    def reset(self, images: list[Image.Image], **row: Any) -> None:
        """Start a rollout of a row; the model sees the picture in few pixels."""
        self._picture = images[0]

    def zoom(self, x: int, y: int) -> Image.Image:
        """Look closer at one cell of the picture.

        Args:
            x: Column of the cell, 0 to 3 from the left.
            y: Row of the cell, 0 to 3 from the top.

        Returns:
            The middle of the cell.
        """
        assert self._picture is not None
        return close_up(self._picture, x, y)


def main() -> None:
    started = time.perf_counter()
    parser = parse_options(__doc__ or "", steps=150, output_dir="outputs/tools_zoom", choose_generator=True)
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
        max_pixels=MAX_PIXELS,
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
        train_dataset=make_zoom_rows("train", 4096, seed=args.seed),
        environment_factory=Zoom,
    )
    heldout = make_zoom_rows("heldout", 200, seed=0)
    before = rollout_accuracy(trainer, heldout, answer_reward, max_tokens=MAX_TOKENS)
    print(f"accuracy on held-out digits before training: {before:.1%}")
    trainer.train()
    after = rollout_accuracy(trainer, heldout, answer_reward, max_tokens=MAX_TOKENS)
    print(f"accuracy on held-out digits after training: {after:.1%}")
    print_result(started, args, accuracy_before=before, accuracy_after=after)


if __name__ == "__main__":
    main()
