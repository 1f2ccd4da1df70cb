"""Teach the tiny Qwen2.5-VL to call tools, by plain supervised training on the warm-up digits.

    python assets/warm_up_tools.py --output assets/tiny-tools

Starts from `assets/tiny-vl` and adds the tokens and the chat template that tool calls need. The conversations are those
of the tasks in `examples/tool_tasks.py`: a question, a call, what the tool answers, the answer to the question, token
by token as a run makes them. Learned are the turns of the assistant alone. Phases, each a number of steps:

1. `skills`: questions for one of four digits of a scene, answered by zooming in to it, and sums, differences and
   products, answered with a calculator.
2. `mix`: the same, but in `WRONG_SHARE` of the cases the digits at the bottom are looked for at the top, and
   differences and products are computed as sums. Afterwards the model can still do everything, but in these cases it
   prefers the wrong call; which one is right is left to the reward.

The seed fixes everything but the order of floating-point sums, so another machine reproduces the accuracy, not the
bits. The greedy accuracy on held-out questions is printed after each phase and at the end.
"""

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText, AutoProcessor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from warm_up import TURN_END, draw_varied

import digits as data
import tool_tasks as tasks

START = data.MODEL_DIR
WRONG_SHARE = 0.6
BATCH_SIZE, NUM_ZOOM = 32, 20
"""Conversations in a step, and how many of them are about pictures."""
PARAMETERS = {"zoom": ("x", "y"), "calculate": ("expression",)}
ZOOM_START, ZOOM_MIDDLE = '\n{"name": "zoom", "arguments": {"x": ', ', "y": '
CALCULATE_START, CALCULATE_END = '\n{"name": "calculate", "arguments": {"expression": "', '"}}\n'
NEW_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
NEW_TOKENS += (ZOOM_START, ZOOM_MIDDLE, "}}\n", CALCULATE_START, CALCULATE_END)
NEW_TOKENS += ("Tools:", " zoom(x, y)", " calculate(expression)", " is at", " top", " bottom", " left", " right")
NEW_TOKENS += (" plus", " minus", " times")
"""Pieces of text that become one token each: a call takes about ten. None is special: all stay when ids are decoded."""
CHAT_TEMPLATE = Path(__file__).with_name("tools_template.jinja")
"""That of tiny-vl, with tools in front, and with calls and what tools return."""


class Phase(NamedTuple):
    """A part of the warm-up: steps, peak learning rate and the share of wrong calls."""

    name: str
    num_steps: int
    learning_rate: float
    wrong_share: float = 0.0


PHASES = (Phase("skills", 1800, 1e-3), Phase("mix", 100, 3e-4, WRONG_SHARE))


class Example(NamedTuple):
    """A conversation with its pictures, scene and close-up, and its digits: the scene's cells, the close-up's digit."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    images: list[Image.Image]
    cells: list[tuple[int, int]]
    digit: int | None


def schema(name: str) -> dict[str, Any]:
    """A tool as chat templates get it, with what this one reads: its name and the names of its parameters."""
    properties = {parameter: {} for parameter in PARAMETERS[name]}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def converse(name: str, content: Any, arguments: dict[str, Any], response: Any, answer: str) -> list[dict[str, Any]]:
    """The messages of a question that is answered after one call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": response},
        {"role": "assistant", "content": answer},
    ]


def zoom_example(rng: random.Random, wrong_share: float) -> Example:
    """A question about a scene; in `wrong_share` of those about the bottom the model looks at the top."""
    sheet = data.read_sheet("warmup")
    digits = rng.sample(range(10), len(tasks.PLACES))
    sides = [rng.choice(tasks.DIGIT_SIDES) for _ in digits]
    drawn = [
        draw_varied(rng.choice(sheet[digit]), (side, side), rng) for digit, side in zip(digits, sides, strict=True)
    ]
    scene, cells = tasks.compose(drawn, rng)
    asked = rng.randrange(len(tasks.PLACES))
    seen = asked % 2 if rng.random() < wrong_share else asked
    x, y = cells[seen]
    content = [{"type": "image"}, {"type": "text", "text": tasks.ask_place(tasks.PLACES[asked])}]
    messages = converse("zoom", content, {"x": x, "y": y}, [{"type": "image"}], str(digits[seen]))
    return Example(messages, [schema("zoom")], [scene, tasks.close_up(scene, x, y)], cells, digits[seen])


def calculator_example(rng: random.Random, wrong_share: float) -> Example:
    """A question for a sum, difference or product; in `wrong_share` of the cases the model computes the sum."""
    first, second = tasks.draw_numbers("warmup", rng)
    word = rng.choice(list(tasks.OPERATORS))
    sign = "+" if rng.random() < wrong_share else tasks.OPERATORS[word]
    value = str(tasks.result(first, sign, second))
    arguments = {"expression": f"{first}{sign}{second}"}
    messages = converse("calculate", f"What is {first} {word} {second}?", arguments, value, value)
    return Example(messages, [schema("calculate")], [], [], None)


def extend(processor: Any, model: Any) -> None:
    """Add `NEW_TOKENS`, each starting as the mean of the tokens that it was before, and set the chat template."""
    tokenizer, weight = processor.tokenizer, model.get_input_embeddings().weight.detach()
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in NEW_TOKENS]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in NEW_TOKENS])
    means = torch.stack([weight[ids].mean(dim=0) for ids in pieces])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[-len(NEW_TOKENS) :] = means
    processor.chat_template = CHAT_TEMPLATE.read_text()


def sampled_spans(processor: Any, ids: Sequence[int]) -> Iterator[slice]:
    """Where the turns of the assistant lie in the ids of a conversation, each with the token that ends it."""
    header = processor.tokenizer("<|im_start|>assistant\n")["input_ids"]
    end = processor.tokenizer.convert_tokens_to_ids(TURN_END)
    for start in range(len(header), len(ids)):
        if list(ids[start - len(header) : start]) == header:
            yield slice(start, ids.index(end, start) + 1)


def run_size(processor: Any) -> dict[str, int]:
    """The size of pictures in the runs, as the image processor takes it."""
    smallest = min(processor.image_processor.size["shortest_edge"], tasks.MAX_PIXELS)
    return {"shortest_edge": smallest, "longest_edge": tasks.MAX_PIXELS}


def make_batch(processor: Any, phase: Phase, rng: random.Random) -> dict[str, torch.Tensor]:
    """Model inputs and `labels` (B, T) for a batch of conversations.

    There are hints, as a help that costs nothing, in what comes after a visual token: of a scene, the place of each
    digit's cell within its quarter; of a close-up, its digit, after the last one.
    """
    makers = (zoom_example,) * NUM_ZOOM + (calculator_example,) * (BATCH_SIZE - NUM_ZOOM)
    examples = [make(rng, phase.wrong_share) for make in makers]
    texts = [processor.apply_chat_template(example.messages, tools=example.tools).rstrip("\n") for example in examples]
    images = [example.images for example in examples if example.images]
    batch = dict(
        processor(
            text=texts, images=images, padding=True, return_tensors="pt", images_kwargs={"size": run_size(processor)}
        )
    )
    labels = torch.full_like(batch["input_ids"], -100)
    slot = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    numerals: list[int] = processor.tokenizer.convert_tokens_to_ids(list("0123456789"))
    for row, example in enumerate(examples):
        ids = batch["input_ids"][row]
        for span in sampled_spans(processor, ids.tolist()):
            labels[row, span] = ids[span]
        slots = (ids == slot).nonzero().flatten().tolist()
        for position, (x, y) in zip(slots, example.cells, strict=False):  # a visual token covers a quarter
            labels[row, position + 1] = numerals[x % 2 + 2 * (y % 2)]
        if example.digit is not None:
            labels[row, slots[-1] + 1] = numerals[example.digit]
    return {**batch, "labels": labels}


def train(model: Any, processor: Any, phase: Phase, optimizer: torch.optim.Optimizer, rng: random.Random) -> None:
    """Run a phase; the learning rate rises for 50 steps and then falls to a tenth."""
    model.train()
    started, total = time.perf_counter(), 0.0
    for step in range(1, phase.num_steps + 1):
        fall = 0.55 + 0.45 * math.cos(math.pi * step / phase.num_steps)
        optimizer.param_groups[0]["lr"] = phase.learning_rate * min(1.0, step / 50) * fall
        loss = model(**make_batch(processor, phase, rng)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if step % 50 == 0:
            spent = time.perf_counter() - started
            print(f"{phase.name:>7} step {step:5d} loss {total / 50:.3f} {spent:6.1f} s", flush=True)
            total = 0.0


@torch.no_grad()
def reply(model: Any, processor: Any, texts: list[str], images: list[list[Image.Image]]) -> list[str]:
    """The most likely turn after each text, without the token that ends it."""
    batch = processor(
        text=texts, images=images if any(images) else None, padding=True, return_tensors="pt",
        images_kwargs={"size": run_size(processor)},
    )  # fmt: skip
    output = model.generate(**batch, max_new_tokens=16, do_sample=False)
    turns = processor.batch_decode(output[:, batch["input_ids"].shape[1] :])
    return [turn.partition(TURN_END)[0] for turn in turns]


def call_tool(turn: str, images: list[Image.Image]) -> tuple[dict[str, Any], Any]:
    """The call of a turn and what the tool answers; `ValueError`, `KeyError` or `TypeError` without a correct call."""
    call = json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    arguments = call["arguments"]
    if call["name"] == "zoom":
        return call, tasks.close_up(images[0], arguments["x"], arguments["y"])
    first, sign, second = re.split(r"([-+*])", arguments["expression"])
    return call, str(tasks.result(int(first), sign, int(second)))


def evaluate(model: Any, processor: Any, name: str, rows: Sequence[Any]) -> dict[str, float]:
    """Share of rows that are right after one call, both greedy, by task and over `all`."""
    model.eval()
    hits: dict[str, list[float]] = {}
    for first in range(0, len(rows), 50):
        part = rows[first : first + 50]
        chats: list[list[dict[str, Any]]] = []
        images = [list(row.get("images", ())) for row in part]
        for row in part:
            pictures = [{"type": "image"}] * len(row.get("images", ()))
            content = [*pictures, {"type": "text", "text": row["prompt"][0]["content"]}]
            chats.append([{"role": "user", "content": content}])
        options: dict[str, Any] = {"tools": [schema(name)], "add_generation_prompt": True}
        turns = reply(model, processor, [processor.apply_chat_template(chat, **options) for chat in chats], images)
        for chat, turn, seen in zip(chats, turns, images, strict=True):
            try:
                call, value = call_tool(turn, seen)
            except (ValueError, KeyError, TypeError):
                call, value = {"name": name, "arguments": {}}, "wrong call"
            if isinstance(value, Image.Image):
                seen.append(value)
                value = [{"type": "image"}]
            chat += converse(name, None, call["arguments"], value, "")[1:3]
        turns = reply(model, processor, [processor.apply_chat_template(chat, **options) for chat in chats], images)
        for row, turn in zip(part, turns, strict=True):
            hits.setdefault(row["task"], []).append(turn == row["answer"])
            hits.setdefault("all", []).append(turn == row["answer"])
    return {task: sum(values) / len(values) for task, values in sorted(hits.items())}


def report(model: Any, processor: Any, seed: int, when: str) -> None:
    """Print the accuracy on 500 held-out questions for each tool."""
    zoom, numbers = tasks.make_zoom_rows("heldout", 500, seed), tasks.make_calculator_rows("heldout", 500, seed)
    for name, rows in (("zoom", zoom), ("calculate", numbers)):
        print(f"held-out greedy accuracy {when}, {name}:", evaluate(model, processor, name, rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    processor = AutoProcessor.from_pretrained(START)
    model = AutoModelForImageTextToText.from_pretrained(START).float()
    extend(processor, model)
    print("parameters:", sum(parameter.numel() for parameter in model.parameters()))
    rng, optimizer = random.Random(options.seed), torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    for phase in PHASES:
        train(model, processor, phase, optimizer, rng)
        report(model, processor, options.seed, f"after {phase.name}")
    model.half().save_pretrained(options.output)
    processor.save_pretrained(options.output)
    saved = AutoModelForImageTextToText.from_pretrained(options.output, dtype=torch.float32)
    report(saved, AutoProcessor.from_pretrained(options.output), options.seed, "of the saved model")


if __name__ == "__main__":
    main()
