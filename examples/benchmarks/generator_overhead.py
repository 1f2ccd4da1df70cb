"""What our generators cost beside the engines that they call, on the same requests.

    python examples/benchmarks/generator_overhead.py
    python examples/benchmarks/generator_overhead.py --engines vllm --repeats 20

- `vllm`: `VLLMColocateGenerator.generate` against `LLM.generate` of the same engine, with the same token ids, pictures
  and sampling parameters made beforehand. Caches are emptied before each call. Needs vLLM.
- `transformers`: `TransformersGenerator.generate` against `generate` of transformers, given the key-value cache of one
  prefill of each prompt, repeated for its completions.

Both sides run in turn in this process, `--repeats` times; no completion stops early. Printed are the medians in
seconds, the ratio of each pair (median, and the middle half of them), and ours as a share above the engine's.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# Read when torch and vLLM are imported.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")
for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from digits import MODEL_DIR, make_rows  # noqa: E402
from vlmroll import SamplingParams, TransformersGenerator  # noqa: E402
from vlmroll.modeling import load_model  # noqa: E402
from vlmroll_processors import Prompt, collate, load_adapter  # noqa: E402

Call = Callable[[], int]


def compare(name: str, ours: Call, bare: Call, prepare: Callable[[], None], repeats: int) -> None:
    """Time both in turn and print what came out. A call returns how many tokens it made."""
    tokens = {ours(), bare()}  # also warms up
    if len(tokens) != 1:
        raise AssertionError(f"{name}: the two sides made different numbers of tokens, {tokens}")
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for i in range(repeats):
        sides = [("ours", ours), ("bare", bare)]
        for side, call in sides if i % 2 else reversed(sides):
            prepare()
            started = time.perf_counter()
            call()
            times[side].append(time.perf_counter() - started)
    ratios = [one / other for one, other in zip(times["ours"], times["bare"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = {side: statistics.median(values) for side, values in times.items()}
    print(
        f"{name}: {tokens.pop()} tokens, ours {medians['ours']:.3f} s, bare {medians['bare']:.3f} s, ratio of pairs "
        f"{statistics.median(ratios):.3f} (middle half {low:.3f} to {high:.3f}, n={repeats}); "
        f"of the medians {medians['ours'] / medians['bare'] - 1:+.1%}",
        flush=True,
    )


def with_vllm(model: Any, prompts: Sequence[Prompt], args: argparse.Namespace) -> None:
    """Our in-process generator against its engine."""
    from vllm import SamplingParams as VLLMSamplingParams  # pyright: ignore[reportMissingImports]

    from vlmroll.generators.vllm_colocate import VLLMColocateGenerator
    from vlmroll.generators.vllm_start import EngineOptions

    adapter = load_adapter(MODEL_DIR)
    engine = {"enforce_eager": True, "max_num_seqs": 256}
    generator = VLLMColocateGenerator(model, adapter, options=EngineOptions(max_model_length=512, more=engine))
    llm: Any = generator._llm  # pyright: ignore[reportPrivateUsage]
    sampling = SamplingParams(max_tokens=args.tokens, seed=0, extra={"ignore_eos": True})
    plain = VLLMSamplingParams(
        n=args.generations,
        max_tokens=args.tokens,
        logprobs=0,
        seed=0,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        bad_words=[adapter.tokenizer.convert_ids_to_tokens(i) for i in sorted(adapter.vision_ids)],
    )
    inputs = [
        {
            "prompt_token_ids": list(prompt.engine_ids),
            "multi_modal_data": {"image": [picture.image for picture in prompt.images]},
            "multi_modal_uuids": {"image": [picture.sha256 for picture in prompt.images]},
        }
        for prompt in prompts
    ]

    def ours() -> int:
        return sum(map(len, generator.generate(prompts, sampling, args.generations).completion_ids))

    def bare() -> int:
        answers = llm.generate(inputs, plain, use_tqdm=False)
        return sum(len(output.token_ids) for answer in answers for output in answer.outputs)

    def forget() -> None:
        llm.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()
        llm.llm_engine.reset_mm_cache()

    compare("vllm", ours, bare, forget, args.repeats)
    generator.close()


def with_transformers(model: Any, prompts: Sequence[Prompt], args: argparse.Namespace) -> None:
    """Our generator that runs the policy against `generate` of transformers with one prefill."""
    adapter = load_adapter(MODEL_DIR)
    for holder in (model.generation_config, adapter.tokenizer):
        holder.eos_token_id = None  # nothing stops early
    generator = TransformersGenerator(model, adapter)
    sampling = SamplingParams(max_tokens=args.tokens, seed=0)
    batch = collate(prompts, pad_token_id=0)
    inputs = batch.model_inputs()
    positions = inputs["position_ids"]
    banned = sorted(adapter.vision_ids)

    def ours() -> int:
        return sum(map(len, generator.generate(prompts, sampling, args.generations).completion_ids))

    @torch.no_grad()
    def bare() -> int:
        cache = DynamicCache(config=model.config.get_text_config())
        head = {
            k: v[..., :-1] if k in ("input_ids", "attention_mask", "position_ids") else v for k, v in inputs.items()
        }
        head = {k: v[:, :-1] if k == "mm_token_type_ids" else v for k, v in head.items()}
        model(**head, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(args.generations)
        ids, mask = (inputs[name].repeat_interleave(args.generations, 0) for name in ("input_ids", "attention_mask"))
        # It works out positions from the last prompt's offset, which the model keeps.
        offset = positions[0].amax(-1) + 1 - inputs["attention_mask"].sum(-1)
        model.model.rope_deltas = offset.repeat_interleave(args.generations)[:, None]
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            do_sample=True,
            top_k=0,
            max_new_tokens=args.tokens,
            suppress_tokens=banned,
            eos_token_id=None,
            pad_token_id=0,
        )
        return int(found[:, ids.shape[1] :].numel())

    compare("transformers", ours, bare, lambda: None, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("vllm", "transformers"), default=["transformers", "vllm"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    rows = make_rows("train", args.prompts, seed=0)
    for engine in args.engines:
        model = load_model(str(MODEL_DIR)).eval()
        prompts = load_adapter(MODEL_DIR).encode(rows)
        {"vllm": with_vllm, "transformers": with_transformers}[engine](model, prompts, args)


if __name__ == "__main__":
    main()
