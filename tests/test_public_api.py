"""The public names of both packages, and how little it costs to import them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SDK, PROCESSORS = ROOT / "sdk", ROOT / "processors"

PUBLIC_NAMES = {
    "vlmroll": [
        "Batch",
        "Completion",
        "ContinuousBatchingGenerator",
        "GRPOConfig",
        "GRPOTrainer",
        "GenerationOutput",
        "Generator",
        "PolicyConfig",
        "PolicyTrainer",
        "RLOOConfig",
        "RLOOTrainer",
        "Rollout",
        "SamplingParams",
        "ScriptedGenerator",
        "ToolLoop",
        "TransformersGenerator",
        "Turns",
        "VLLMColocateGenerator",
        "VLLMServerGenerator",
        "advantages",
        "losses",
        "rewards",
        "tools",
    ],
    "vlmroll_processors": [
        "Continuation",
        "FamilyAdapter",
        "ImageSpan",
        "Join",
        "JoinKind",
        "PackedBatch",
        "PaddedBatch",
        "Picture",
        "ProcessorAdapter",
        "Prompt",
        "PromptTooLong",
        "Video",
        "collate",
        "conformance",
        "load_adapter",
        "pack",
    ],
}
HEAVY = ("datasets", "trackio", "transformers", "vllm", "wandb")


def run_python(code: str, *roots: Path) -> str:
    """What `code` prints in a new interpreter whose path starts with `roots`; a warning there is an error."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("package", "roots"), [("vlmroll", (SDK, PROCESSORS)), ("vlmroll_processors", (PROCESSORS,))])
def test_import_is_light(package: str, roots: tuple[Path, ...]) -> None:
    code = f"import sys, {package}; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    assert run_python(code, *roots) == ""


def test_processors_work_without_the_trainer() -> None:
    """Every module of the lower layer can be imported where `import vlmroll` fails."""
    code = """
import importlib, pkgutil, sys
sys.modules["vlmroll"] = None  # an installed vlmroll may be on the path: this makes `import vlmroll` fail
import vlmroll_processors
for module in pkgutil.walk_packages(vlmroll_processors.__path__, "vlmroll_processors."):
    importlib.import_module(module.name)
for name in vlmroll_processors.__all__:
    getattr(vlmroll_processors, name)
"""
    run_python(code, PROCESSORS)


@pytest.mark.parametrize("package", sorted(PUBLIC_NAMES))
def test_public_names_are_the_documented_ones(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == PUBLIC_NAMES[package]
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module)), "`dir` shows the names that are loaded on first use, too"
