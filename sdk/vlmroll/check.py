"""`vlmroll check`: what generators do for a model, before GPU hours are spent on it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vlmroll.checking import Bench, GeneratorReport
    from vlmroll.generators import Generator

TRANSFORMERS, BATCHING, COLOCATE, SERVER = NAMES = (
    *("transformers", "continuous-batching", "vllm-colocate", "vllm-server"),
)
_DEFAULT_SERVER = "http://127.0.0.1:8000"
_PATIENCE = 5.0  # seconds to wait for a server's first answer
_LEAST_CONTEXT = 512
_ON_ACCELERATOR = 4096
_EPILOG = """
The mean difference of log-probabilities may be at most --tolerance. It is 1e-3 for float32, where engines differ by the
order in which they add (1e-6 to 1e-4), so that more is a fault, and 5e-2 for bfloat16 and float16, whose two to three
digits alone make about 2e-2. The exit status is 0 when everything that ran has passed, else 1. While it runs the
weights are changed and put back, also those of the server; do not check a server that a run trains with.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlmroll check`."""
    parser.add_argument("model", help="hub id or path of the model, or the folder of a PEFT adapter for it")
    parser.add_argument(
        "--generators",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; default: all that are installed, and the server when --server is given",
    )
    parser.add_argument(
        "--server", metavar="URL", help=f"address of `vlmroll serve MODEL` (as a rule {_DEFAULT_SERVER})"
    )
    parser.add_argument("--api-key", help="key of the server; default: VLLM_API_KEY")
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="PATH", help="pictures to ask about")
    parser.add_argument("--min-pixels", type=int, help="pixel budget of a picture, as in training")
    parser.add_argument("--max-pixels", type=int)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", help="default: an accelerator, or else cpu")
    parser.add_argument("--vllm-gpu-memory-utilization", type=float, default=0.3, metavar="SHARE")
    parser.add_argument("--tolerance", type=float, help="see below")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest completion (default: 32)")
    parser.add_argument("--num-generations", type=int, default=4, help="samples of each prompt (default: 4)")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there, too")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    """Check the generators and print the table; the exit status."""
    from vlmroll.checking.kit import make_report

    try:
        bench = _bench(args)
    except (ValueError, OSError) as error:
        print(f"vlmroll check: {error}", file=sys.stderr)
        return 1
    names: Sequence[str] = args.generators or [name for name in NAMES if name != SERVER or args.server]
    report = make_report(bench, [_one(bench, name, args) for name in dict.fromkeys(names)])
    print(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 0 if report.passed else 1


def _bench(args: argparse.Namespace) -> "Bench":
    """The model, its adapter and the prompts.

    Raises:
        ValueError: there is no such model or picture, or the options do not fit it.
    """
    from vlmroll.checking import Bench
    from vlmroll.checking.kit import default_tolerance
    from vlmroll.checking.prompts import encode_prompts
    from vlmroll.modeling import load_model
    from vlmroll_processors.loading import load_adapter

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    base = _base_of(args.model)
    model = load_model(base or args.model, {"dtype": args.dtype}, trust_remote_code=args.trust_remote_code)
    adapter = load_adapter(
        base or args.model,
        min_pixels=args.min_pixels,
        max_pixels=args.max_pixels,
        config=model.config,
        trust_remote_code=args.trust_remote_code,
    )
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, args.model)
    model.to(args.device or accelerator or "cpu").eval()
    return Bench(
        model=model,
        adapter=adapter,
        prompts=encode_prompts(adapter, [_opened(path) for path in args.images]),
        tolerance=default_tolerance(model.dtype) if args.tolerance is None else args.tolerance,
        max_tokens=args.max_tokens,
        num_generations=args.num_generations,
    )


def _base_of(folder: str) -> str | None:
    """What a PEFT adapter's folder names as its base model; None for any other model."""
    path = Path(folder) / "adapter_config.json"
    return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] if path.is_file() else None


def _opened(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        return image


def _one(bench: "Bench", name: str, args: argparse.Namespace) -> "GeneratorReport":
    """The report of one generator, started for it and closed behind it."""
    from vlmroll.checking.kit import MISFITS, TEXT_ONLY_GENERATORS, examine, words
    from vlmroll.checking.report import STARTS, GeneratorReport, Outcome
    from vlmroll.generators.vllm_http import ServerGone

    def not_started(result: Any, error: BaseException) -> GeneratorReport:
        return GeneratorReport(name=name, outcomes=(Outcome(name=STARTS, result=result, detail=words(error)),))

    print(f"checking {name}", file=sys.stderr, flush=True)
    try:
        generator = _MAKERS[name](bench, args)
    except (ImportError, ServerGone) as error:
        return not_started("failed" if args.generators or name == SERVER else "not run", error)
    except MISFITS as error:
        # This one says which models it is not made for.
        return not_started("refused" if name == BATCHING and isinstance(error, ValueError) else "failed", error)
    try:
        return examine(bench, name, generator, text_only=name in TEXT_ONLY_GENERATORS)
    finally:
        generator.close()


def _transformers(bench: "Bench", args: argparse.Namespace) -> "Generator":
    from vlmroll.generators import TransformersGenerator

    return TransformersGenerator(bench.model, bench.adapter)


def _continuous_batching(bench: "Bench", args: argparse.Namespace) -> "Generator":
    from vlmroll.generators.continuous_batching import ContinuousBatchingGenerator

    return ContinuousBatchingGenerator(bench.model, bench.adapter)


def _colocate(bench: "Bench", args: argparse.Namespace) -> "Generator":
    from vlmroll.generators.vllm_colocate import VLLMColocateGenerator
    from vlmroll.generators.vllm_requests import require_vllm
    from vlmroll.generators.vllm_start import EngineOptions
    from vlmroll.setup import context_length

    require_vllm()
    on_cpu = bench.model.device.type == "cpu"
    needed = max(prompt.num_tokens for prompt in bench.prompts) + bench.max_tokens
    length = max(needed, _LEAST_CONTEXT if on_cpu else _ON_ACCELERATOR)
    context = context_length(bench.model)
    more: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    if on_cpu:  # compiling takes longer than the check, and the cache would take most of the memory
        more |= {"enforce_eager": True, "max_num_seqs": 32, "max_num_batched_tokens": max(length, 2048)}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    options = EngineOptions(
        max_model_length=length if context is None else min(length, context),
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        more=more,
    )
    return VLLMColocateGenerator(bench.model, bench.adapter, options=options)


def _server(bench: "Bench", args: argparse.Namespace) -> "Generator":
    from vlmroll.generators.vllm_http import VLLMServer
    from vlmroll.generators.vllm_server import VLLMServerGenerator

    url, key = args.server or _DEFAULT_SERVER, args.api_key or os.environ.get("VLLM_API_KEY")
    for one in url.split(","):  # the generator itself would wait for long
        probe = VLLMServer(one.strip(), key, timeout=_PATIENCE, model=args.model)
        probe.connect({})
        probe.close()
        theirs, ours = probe.description["dtype"], str(bench.model.dtype).removeprefix("torch.")
        if theirs != ours:
            print(
                f"{probe.url} runs in {theirs}, the policy in {ours}, so log-probabilities differ by their rounding; "
                f"to look for other differences give --dtype {theirs}, or serve with --dtype {ours}",
                file=sys.stderr,
            )
    return VLLMServerGenerator(bench.model, bench.adapter, base_url=url, api_key=key)


_MAKERS = {
    TRANSFORMERS: _transformers,
    BATCHING: _continuous_batching,
    COLOCATE: _colocate,
    SERVER: _server,
}
