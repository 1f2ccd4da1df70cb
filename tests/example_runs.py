"""Running an example script as a person would, for several test files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_example(script: str, *options: str, folder: Path) -> dict[str, Any]:
    """The JSON of a script's last line, after two steps; it writes into `out` in the folder and nowhere else."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("sdk", "processors"))
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py"), "--steps", "2", *options]
    run = subprocess.run(
        [*command, "--output-dir", str(folder / "out")],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert {path.name for path in folder.iterdir()} <= {"out"}
    return json.loads(run.stdout.splitlines()[-1])
