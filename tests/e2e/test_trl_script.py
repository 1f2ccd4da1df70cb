"""A script written from TRL's documentation runs when only its import line is changed."""

import os
import subprocess
import sys
from pathlib import Path

from tiny_models import tiny

# What a person has who trained with TRL: conversational prompts, an images column, two reward functions, a config of
# 15 common options. Only the first import was `from trl import GRPOConfig, GRPOTrainer`.
SCRIPT = '''
import re
import sys

from vlmroll import GRPOConfig, GRPOTrainer

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage

MODEL, OUTPUT = sys.argv[1:]
SYSTEM = "Think inside <think> tags and answer inside <answer> tags."


def example(index):
    colours = ["red", "green", "blue", "white"]
    count = 1 + index % 3
    pictures = [PILImage.new("RGB", (32 + 16 * i, 48), colours[(index + i) % 4]) for i in range(count)]
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "What colour does the first picture have?"},
        ],
        "images": pictures,
        "solution": colours[index % 4],
    }


features = Features(
    {
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "images": List(Image()),
        "solution": Value("string"),
    }
)
dataset = Dataset.from_list([example(i) for i in range(12)], features=features)
split = dataset.train_test_split(test_size=4, seed=0)


def format_reward(completions, **kwargs):
    """1 when the completion has the right form."""
    pattern = r"^<think>.*</think><answer>.*</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content, re.DOTALL) else 0.0 for content in contents]


def accuracy_reward(completions, solution, **kwargs):
    """1 when the colour is named."""
    return [float(s in c[0]["content"]) for c, s in zip(completions, solution)]


training_args = GRPOConfig(
    output_dir=OUTPUT,
    learning_rate=1e-5,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=8,
    max_steps=2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    bf16=False,
    beta=0.01,
    temperature=0.9,
    log_completions=True,
    report_to="none",
)
trainer = GRPOTrainer(
    model=MODEL,
    args=training_args,
    reward_funcs=[format_reward, accuracy_reward],
    train_dataset=split["train"],
    eval_dataset=split["test"],
)
trainer.train()
trainer.save_model(OUTPUT)
logs = {name for log in trainer.state.log_history for name in log}
assert {"reward", "kl", "rewards/format_reward/mean", "rewards/accuracy_reward/mean", "eval_reward"} <= logs
print("finished", trainer.state.global_step)
'''


def test_a_script_for_trl_runs_with_its_import_line_changed(tmp_path: Path) -> None:
    made = tiny("qwen2_5_vl")
    made.model.save_pretrained(tmp_path / "model")
    made.processor.save_pretrained(tmp_path / "model")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parents[2] / root) for root in ("sdk", "processors")]
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "model"), "out"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "finished 2" in run.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert list((tmp_path / "out" / "completions").glob("*.parquet"))
