"""`vlmroll serve`: vLLM's own server with the flags that training needs."""

import argparse
import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence

import torch

from vlmroll.generators.vllm_requests import require_vllm

_WORKER = "vlmroll.generators.vllm_worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlmroll serve`."""
    parser.add_argument("model", help="hub id or path of the model that is trained")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", default=None, help="default: VLLM_API_KEY, or a new one, which is printed")
    parser.add_argument("--no-api-key", action="store_true", help="let everybody in who can reach the address")
    parser.add_argument("--min-pixels", type=int, help="least pixels of a picture, where the run sets min_pixels")
    parser.add_argument("--max-pixels", type=int, help="most pixels of a picture, where the run sets max_pixels")
    parser.add_argument("--dry-run", action="store_true", help="print the command and do not run it")
    parser.epilog = "Further arguments go to vLLM, such as --dtype, --max-model-len or --tensor-parallel-size."


def command(model: str, host: str, port: int, more: Sequence[str]) -> list[str]:
    """The command line of vLLM's server. Arguments in `more` stand last, so that they win."""
    # `vllm serve` itself looks for a distribution named vllm, which the CPU build is not.
    backend = "nccl" if torch.cuda.is_available() else "vlmroll-file"
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host),
        *("--port", str(port), "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm", "--weight-transfer-config", f'{{"backend": "{backend}"}}'),
        *("--worker-extension-cls", f"{_WORKER}.PolicyWorker", "--middleware", f"{_WORKER}.RequireKey"),
        # On a CPU a prompt that is read in parts fails if its request has a seed.
        *(
            []
            if torch.cuda.is_available()
            else ["--distributed-executor-backend", "uni", "--no-enable-chunked-prefill"]
        ),
        *more,
    ]


def environment(key: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of vLLM's server; what the person has set stays."""
    wanted = {"VLLM_SERVER_DEV_MODE": "1"}  # opens the paths that take weights and reset caches
    if not torch.cuda.is_available():
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {**wanted, **given} | ({"VLLM_API_KEY": key} if key else {})


def run(args: argparse.Namespace, more: Sequence[str]) -> None:
    """Become the server."""
    require_vllm()
    bounds = {name: getattr(args, name) for name in ("min_pixels", "max_pixels") if getattr(args, name) is not None}
    own = ["--mm-processor-kwargs", json.dumps(bounds)] if bounds else []
    line = command(args.model, args.host, args.port, [*own, *more])
    key = None if args.no_api_key else args.api_key or os.environ.get("VLLM_API_KEY") or secrets.token_urlsafe(24)
    changed = environment(key, {})
    shown = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in changed.items()), shlex.join(line)])
    if args.dry_run:
        print(shown)
        return
    if key and key != os.environ.get("VLLM_API_KEY"):
        print(f"Before training, in its shell: export VLLM_API_KEY={shlex.quote(key)}", flush=True)
    given = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    os.execve(line[0], line, environment(key, given))
