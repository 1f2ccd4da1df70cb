"""Time of reading the prompts and of the tokens that follow, against a bare loop over the same model.

    python examples/benchmarks/decoding.py
    python examples/benchmarks/decoding.py --workload w5-g32 --repeats 5
    python examples/benchmarks/decoding.py --workload w2 --profile

The bare loop runs each prompt once, repeats transformers' `DynamicCache` for its completions, and then calls the model
and draws, token by token; it keeps no log-probabilities and knows no stop. Ours is `TransformersGenerator.generate`.
Both run in turn in this process, once for a single token and once for `--tokens` more, which no completion stops
before. Printed are the medians in seconds, and the ratio of each pair (median, and the middle half of them).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# Read when torch is imported.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")

import torch  # noqa: E402

from random_models import build_model, build_processor, build_tokenizer  # noqa: E402
from vlmroll import SamplingParams, TransformersGenerator  # noqa: E402
from vlmroll_processors import Prompt, collate, load_adapter  # noqa: E402
from workloads import WORKLOADS, Workload, make_rows  # noqa: E402

Side = Callable[[int], int]


def sides_of(workload: Workload, seed: int) -> dict[str, Side]:
    """Calls that take the number of tokens of each completion, and return how many they made."""
    tokenizer = build_tokenizer(workload.shape.vocabulary)
    model: Any = build_model(workload.shape, tokenizer, seed).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token = None  # nothing stops early
    adapter = load_adapter(tokenizer if workload.shape.tower is None else build_processor(tokenizer))
    rows = [
        {"prompt": [{**row["prompt"][0], "content": [*pictures(row), {"type": "text", "text": text_of(row)}]}]}
        for row in make_rows(workload, 1, seed)
    ]
    prompts = adapter.encode(rows)
    generator = TransformersGenerator(model, adapter)

    def ours(tokens: int) -> int:
        sampling = SamplingParams(max_tokens=tokens, seed=seed)
        return sum(map(len, generator.generate(prompts, sampling, workload.num_generations).completion_ids))

    return {"ours": ours, "bare": lambda tokens: bare(model, prompts, workload.num_generations, tokens)}


def pictures(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The pictures of a row as parts of its message."""
    return [{"type": "image", "image": image} for image in row.get("images", ())]


def text_of(row: dict[str, Any]) -> str:
    """The text of a row."""
    return row["prompt"][0]["content"]


@torch.no_grad()
def bare(model: Any, prompts: Sequence[Prompt], num_generations: int, tokens: int) -> int:
    """One prefill, and one step for each token."""
    inputs = collate(prompts, pad_token_id=0).model_inputs()
    output = model(**inputs, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values
    cache.batch_repeat_interleave(num_generations)
    logits = output.logits[:, -1].repeat_interleave(num_generations, 0)
    mask = inputs["attention_mask"].repeat_interleave(num_generations, 0)
    positions = inputs["position_ids"][..., -1:].repeat_interleave(num_generations, -2)
    found: list[torch.Tensor] = []
    for step in range(tokens):
        found.append(torch.multinomial(logits.softmax(-1), 1))
        if step + 1 == tokens:
            break
        mask = torch.cat([mask, torch.ones_like(found[-1])], dim=1)
        positions = positions + 1
        output = model(
            input_ids=found[-1], attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits = output.logits[:, -1]
    return torch.cat(found, dim=1).numel()


def measure(sides: dict[str, Side], tokens: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds up to the first token, and for `tokens` more, of each repeat of each side."""
    made = {side(tokens + 1) for side in sides.values()}  # also warms up
    if len(made) != 1:
        raise AssertionError(f"the sides made different numbers of tokens: {made}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}

    def seconds(side: Side, tokens: int) -> float:
        started = time.perf_counter()
        side(tokens)
        return time.perf_counter() - started

    for i in range(repeats):
        for name in list(sides) if i % 2 else list(sides)[::-1]:
            first = seconds(sides[name], 1)
            times[name].append((first, seconds(sides[name], tokens + 1) - first))
    return times


def report(what: str, times: dict[str, list[float]]) -> None:
    """Print medians, and the ratio of pairs."""
    ratios = [one / other for one, other in zip(times["ours"], times["bare"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    ours, other = (statistics.median(times[name]) for name in ("ours", "bare"))
    print(
        f"{what}: ours {ours:.3f} s, bare {other:.3f} s, ratio of pairs {statistics.median(ratios):.3f} "
        f"(middle half {low:.3f} to {high:.3f}, n={len(ratios)})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="w1")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="instead, print where our side's time goes")
    args = parser.parse_args()
    sides = sides_of(WORKLOADS[args.workload], args.seed)
    if args.profile:
        sides["ours"](2)
        with torch.profiler.profile() as profile:
            sides["ours"](args.tokens + 1)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))
        return
    times = measure(sides, args.tokens, args.repeats)
    for i, what in enumerate(("prompts and first token", f"{args.tokens} tokens more")):
        report(f"{args.workload}, {what}", {name: [pair[i] for pair in pairs] for name, pairs in times.items()})


if __name__ == "__main__":
    main()
