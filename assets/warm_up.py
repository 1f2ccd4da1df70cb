"""Build the tiny Qwen2.5-VL from nothing and warm it up by plain supervised training on the warm-up digits.

    python assets/warm_up.py --output assets/tiny-vl

The model learns to read before it answers: it names each digit with its picture's letter, then a colon, then the
answer, as in `5A3B4C:5A` or `5A3B:8`. Phases, each a number of steps of `batch_size` prompts:

1. `text`: without pictures; what comes after the colon, from the question and made-up readings.
2. `name`: one picture, "Which digit is this?".
3. `skills`: everything with pictures: finding a digit, the larger and the smaller digit, the sum and the difference.
4. `mix`: the same, but the questions for the larger digit and for the sum are answered as if they had asked for the
   smaller digit and for the difference in `WRONG_SHARE` of the cases. Afterwards the model can still do everything,
   but on these two tasks it prefers the wrong kind of answer a little; which one to prefer is left to the reward.

The seed fixes everything but the order of floating-point sums, so another machine reproduces the accuracy, not the
bits. The end of the run prints the greedy accuracy on held-out prompts by task.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import digits as data

WRONG_SHARE = 0.65
PATCH = 4
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
SPECIAL += ("<|image_pad|>", "<|video_pad|>")
END, TURN_END = "<|endoftext|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{- message.content -}}
{%- elif message.content -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class Phase(NamedTuple):
    """A part of the warm-up: steps, prompts in each, peak learning rate, share of each task and of wrong answers."""

    name: str
    num_steps: int
    batch_size: int
    learning_rate: float
    tasks: dict[str, float]
    wrong_share: float = 0.0
    pictures: bool = True


SKILLS = {"find": 3.0, "larger": 3.0, "smaller": 2.0, "sum": 3.0, "difference": 2.0}
PHASES = (
    Phase("text", 800, 96, 1e-3, SKILLS, pictures=False),
    Phase("name", 300, 32, 1e-3, {"name": 1.0}),
    Phase("skills", 900, 32, 1e-3, {**SKILLS, "name": 1.0}),
    Phase("mix", 200, 32, 3e-4, SKILLS, WRONG_SHARE),
)


def ask(task: str, rng: random.Random, wrong_share: float) -> tuple[str, str, list[int]]:
    """Question, reply and digits for a task; `larger` and `sum` are answered wrongly in `wrong_share` of the cases."""
    if task == "name":
        digit = rng.randrange(10)
        return "Which digit is this?", data.reading([digit]), [digit]
    digits = data.draw_digits("sum" if task == "difference" else task, rng)
    smaller = data.reading(digits, only=min(digits))
    difference = str(abs(digits[0] - digits[1]))
    if task == "smaller":
        word = "smaller" if len(digits) == 2 else "smallest"
        text, answer = f"Which picture shows the {word} digit?", smaller
    elif task == "difference":
        text, answer = "What is the difference of the two digits?", difference
    else:
        text, answer = data.QUESTIONS[task](digits, rng)
        answer = answer if task == "sum" else data.reading(digits, only=digits[data.LETTERS.index(answer)])
        if rng.random() < wrong_share:
            answer = {"larger": smaller, "sum": difference}.get(task, answer)
    return text, f"{data.reading(digits)}:{answer}", digits


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over the wording of the prompts: any text can be encoded, digits stay single tokens."""
    rng = random.Random(0)
    words = [ask(task, rng, 0.0)[0] for task in ("name", *SKILLS) for _ in range(300)]
    words += [f"{role}\n" for role in ("system", "user", "assistant", "tool") for _ in range(300)]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[0-9A-D:]| ?[^\s0-9A-D:]+|\s"), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384 - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    others = [token for token in SPECIAL if token not in (END, TURN_END)]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END, additional_special_tokens=others,
        padding_side="left", model_max_length=1024, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_processor() -> Qwen2_5_VLProcessor:
    """Processor whose pixel budget, 16 x 16 to 64 x 64, leaves the pictures of `digits.py` at their sizes."""
    shape: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **shape, **scale),
        tokenizer=build_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(size=size, **shape, **scale),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(processor: Any) -> Qwen2_5_VLForConditionalGeneration:
    """The untrained model, float32: 5 text layers of width 128 (4 heads of 32), 2 vision layers of width 64."""
    ids = {token: int(processor.tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": len(processor.tokenizer), "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": ids[TURN_END], "pad_token_id": ids[END], "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 192, "out_hidden_size": 128,
        "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 32,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(eos_token_id=[ids[TURN_END], ids[END]], pad_token_id=ids[END])
    return model


def draw_varied(glyph: data.Glyph, size: tuple[int, int], rng: random.Random) -> Image.Image:
    """Draw a glyph a little turned, scaled and shifted (up to 10 degrees, 10 % and half a cell of the 8 x 8)."""
    if rng.random() < 0.2:
        return data.draw(glyph, size)
    angle, zoom = math.radians(rng.uniform(-10, 10)), rng.uniform(0.9, 1.1)
    across, down = data.GLYPH / size[0] * zoom, data.GLYPH / size[1] * zoom
    cos, sin = math.cos(angle), math.sin(angle)
    a, b, d, e = cos * across, -sin * down, sin * across, cos * down
    c = data.GLYPH / 2 + rng.uniform(-0.5, 0.5) - (a * size[0] + b * size[1]) / 2
    f = data.GLYPH / 2 + rng.uniform(-0.5, 0.5) - (d * size[0] + e * size[1]) / 2
    picture = Image.fromarray(glyph).transform(
        size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BICUBIC
    )
    return picture.convert("RGB")


def render(processor: Any, text: str, num_images: int) -> str:
    """The prompt of one question as text: the pictures first, then the question, then the assistant's header."""
    parts: list[dict[str, str]] = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
    return processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)


def make_batch(processor: Any, phase: Phase, rng: random.Random) -> dict[str, torch.Tensor]:
    """Model inputs and `labels` (B, T) for a batch of questions, of warm-up digits only.

    Learned are the reply and the end of its turn; without pictures only what comes after its colon. With pictures there
    are, as a help that costs nothing, two hints about each: its last visual token predicts the digit and its
    `<|vision_end|>` the letter.
    """
    sheet = data.read_sheet("warmup")
    texts: list[str] = []
    replies: list[str] = []
    images: list[list[Image.Image]] = []
    shown: list[list[int]] = []
    for task in rng.choices(list(phase.tasks), list(phase.tasks.values()), k=phase.batch_size):
        question, reply, digits = ask(task, rng, phase.wrong_share)
        seen = digits if phase.pictures else []
        sizes = rng.sample(data.SIZES, len(seen))
        images.append([draw_varied(rng.choice(sheet[d]), s, rng) for d, s in zip(seen, sizes, strict=True)])
        texts.append(render(processor, question, len(seen)) + reply + TURN_END)
        replies.append(reply if phase.pictures else reply.rpartition(":")[2])
        shown.append(seen)
    pictures = images if phase.pictures else None
    batch = dict(processor(text=texts, images=pictures, padding=True, return_tensors="pt"))
    labels = torch.full_like(batch["input_ids"], -100)
    picture_end = processor.tokenizer.convert_tokens_to_ids("<|vision_end|>")
    numerals: list[int] = processor.tokenizer.convert_tokens_to_ids(list("0123456789"))
    letters: list[int] = processor.tokenizer.convert_tokens_to_ids(list(data.LETTERS))
    for row, reply in enumerate(replies):  # padding is on the left, so that the reply ends the row
        labels[row, -len(reply) - 1 :] = batch["input_ids"][row, -len(reply) - 1 :]
        for i, end in enumerate((batch["input_ids"][row] == picture_end).nonzero().flatten().tolist()):
            labels[row, end] = numerals[shown[row][i]]  # position t is predicted from position t - 1
            labels[row, end + 1] = letters[i]
    return {**batch, "labels": labels}


def train(model: Any, processor: Any, phases: Iterable[Phase], seed: int) -> None:
    """Run the phases in order; within each the learning rate rises for 50 steps and then falls to a tenth."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for phase in phases:
        start, losses = time.perf_counter(), [0.0]
        for step in range(phase.num_steps):
            fall = 0.55 + 0.45 * math.cos(math.pi * step / phase.num_steps)
            for group in optimizer.param_groups:
                group["lr"] = phase.learning_rate * min(1.0, (step + 1) / 50) * fall
            loss = model(**make_batch(processor, phase, rng)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if (step + 1) % 100 == 0:
                mean, spent = sum(losses[-100:]) / 100, time.perf_counter() - start
                print(f"{phase.name:>7} step {step + 1:5d} loss {mean:.3f} {spent:6.1f} s", flush=True)


@torch.no_grad()
def evaluate(model: Any, processor: Any, rows: Sequence[data.Row]) -> dict[str, float]:
    """Share of rows that greedy decoding answers, by task and over `all`."""
    model.eval()
    hits: dict[str, list[float]] = {}
    for first in range(0, len(rows), 50):
        part = rows[first : first + 50]
        texts = [render(processor, row["prompt"][0]["content"], len(row["images"])) for row in part]
        batch = processor(text=texts, images=[row["images"] for row in part], padding=True, return_tensors="pt")
        output = model.generate(**batch, max_new_tokens=data.MAX_TOKENS, do_sample=False)
        replies = processor.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": reply}] for reply in replies]
        rewards = data.accuracy_reward(completions, [row["answer"] for row in part])
        for row, reward in zip(part, rewards, strict=True):
            hits.setdefault(row["task"], []).append(reward)
            hits.setdefault("all", []).append(reward)
    return {task: sum(values) / len(values) for task, values in sorted(hits.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    processor = build_processor()
    model = build_model(processor)
    print("parameters:", sum(parameter.numel() for parameter in model.parameters()))
    train(model, processor, PHASES, options.seed)
    model.half().save_pretrained(options.output)
    processor.save_pretrained(options.output)
    saved = AutoModelForImageTextToText.from_pretrained(options.output, dtype=torch.float32)
    rows = data.make_rows("heldout", 1000, options.seed)
    print("held-out greedy accuracy:", evaluate(saved, AutoProcessor.from_pretrained(options.output), rows))


if __name__ == "__main__":
    main()
