"""`vlmroll bench`: verdicts as properties, what is recorded, and both sides of a real comparison."""

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as scipy_t

from training_runs import make_trainer
from vlmroll.bench import BenchReport, Comparison, Run, RunFailed, Side, record, run_sides
from vlmroll.bench.runs import LATE_REWARD, MEMORY, REWARD, TIME, values_of
from vlmroll.bench.sides import RECORDER
from vlmroll.bench.verdicts import INSIDE, TOO_FEW, student_t
from vlmroll.cli import main

# The step waits far longer than the rest of it takes, so that other load on the machine disturbs it little.
TRAIN = """
import sys, time
for name in ("datasets", "pandas", "peft", "scipy", "sklearn"):
    sys.modules[name] = None  # not needed, and half of the time that it takes to start
import torch
from transformers import Trainer, TrainingArguments

seed, wait, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        time.sleep(wait)
        return {"loss": self.layer(x).square().mean()}

class Rewarded(Trainer):
    def log(self, logs, *args, **kwargs):
        more = {"reward": -logs["loss"], "num_tokens": 7 * self.state.global_step} if "loss" in logs else {}
        super().log(logs | more)

torch.manual_seed(seed)
options = {"max_steps": 5, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
args = TrainingArguments(folder, seed=seed, use_cpu=True, per_device_train_batch_size=1, **options)
Rewarded(Model(), args, train_dataset=[{"x": torch.ones(1)}] * 5).train()
"""
WAIT = 0.2  # seconds

factors = st.floats(0.5, 2.0)
samples = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6)


def compared(first: list[float], second: list[float], measure: Any = TIME) -> Comparison:
    return Comparison(measure=measure, first=tuple(first), second=tuple(second))


def a_run(side: str, seed: int, repeat: int, seconds: list[float], rewards: list[float], **options: Any) -> Run:
    logs = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)]
    training = {"configuration": options, "first_step": 1, "step_seconds": seconds, "logs": logs}
    made: dict[str, Any] = {"trainings": [training], "memory": {"process": 2**30, "devices": []}}
    made |= {"machine": {"load_at_start": [0.5], "load_at_end": [0.5], "usable_cores": 2}}
    made |= {"versions": {}, "installations": {}}
    return Run(side=side, seed=seed, repeat=repeat, warmup_steps=1, record=made)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN, encoding="utf-8")
    return path


# Verdicts


@given(samples)
def test_equal_sides_are_inside(values: list[float]) -> None:
    for measure in (TIME, MEMORY, REWARD):
        assert compared(values, values[::-1], measure).verdict == INSIDE


@given(samples, samples)
def test_sides_swapped_swap_the_verdict(first: list[float], second: list[float]) -> None:
    opposite = {"faster": "slower", "slower": "faster", "lower": "higher", "higher": "lower", INSIDE: INSIDE}
    for measure in (TIME, REWARD):
        one, other = compared(first, second, measure), compared(second, first, measure)
        assert other.verdict == opposite[one.verdict]
        assert other.margin == pytest.approx(one.margin)
        assert other.spreads == one.spreads[::-1]
        inverse = 1 / one.estimate if measure.is_ratio else -one.estimate
        assert other.estimate == pytest.approx(inverse)


@given(samples, samples, st.integers(-8, 8))
def test_units_and_origins_change_nothing(first: list[float], second: list[float], power: int) -> None:
    plain, scaled = compared(first, second), compared([v * 2**power for v in first], [v * 2**power for v in second])
    assert (scaled.estimate, scaled.margin) == (pytest.approx(plain.estimate), pytest.approx(plain.margin))
    plain = compared(first, second, REWARD)
    moved = compared([v + power for v in first], [v + power for v in second], REWARD)
    assert (moved.estimate, moved.margin) == (pytest.approx(plain.estimate, abs=1e-9), pytest.approx(plain.margin))


@given(samples, factors)
def test_what_is_outside_the_margin_has_its_word(values: list[float], factor: float) -> None:
    found = compared(values, [value * factor for value in values])
    assert found.inside is not None
    low, high = found.inside
    assert found.estimate == pytest.approx(factor)
    expected = "slower" if found.estimate > high else "faster" if found.estimate < low else INSIDE
    assert found.verdict == expected
    assert (low <= 0.991, high >= 1.01) == (True, True), "less than one per cent is no difference"


def test_the_margin_is_the_written_formula() -> None:
    found = compared([1.0, 2.0, 3.0], [11.0, 13.0, 12.0], REWARD)
    assert found.margin == pytest.approx(4.604 * 1.0 * (2 / 3) ** 0.5 * 1.2533, rel=1e-4)
    assert (found.estimate, found.spreads, found.verdict) == (10.0, (1.0, 1.0), "higher")
    assert compared([1.0], [9.0]).verdict == TOO_FEW
    assert compared([1.0], [9.0]).inside is None


def test_quantiles_are_those_of_students_t() -> None:
    for degrees in range(1, 200):
        exact = float(scipy_t.ppf(0.995, degrees))
        assert exact - 1e-3 <= student_t(degrees) <= exact * 1.02


@pytest.mark.parametrize("values", [([], [1.0]), ([1.0], [0.0]), ([1.0], [float("nan")])])
def test_values_that_make_no_ratio_are_refused(values: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="time per step"):
        compared(*values)


@pytest.mark.parametrize("heavy", [False, True])
def test_equal_sides_are_seldom_told_apart_and_a_fifth_is_seen(heavy: bool) -> None:
    """With three runs a side; `heavy`: one run in ten is disturbed, by up to a half."""
    draw = random.Random(0)

    def side(factor: float, noise: float) -> list[float]:
        disturbed = [draw.uniform(1, 1.5) if heavy and draw.random() < 0.1 else 1.0 for _ in range(3)]
        return [factor * extra * (1 + draw.gauss(0, noise)) for extra in disturbed]

    trials = 2000
    wrong = sum(compared(side(1, 0.03), side(1, 0.03)).verdict != INSIDE for _ in range(trials))
    seen = [compared(side(1, 0.02), side(1.2, 0.02)).verdict for _ in range(trials)]
    assert wrong / trials < 0.012
    assert "faster" not in seen
    assert seen.count("slower") / trials > (0.5 if heavy else 0.97)


# Runs


def test_a_seed_counts_once_and_repeats_count_where_there_is_one_seed() -> None:
    seconds = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): 5.0, (1, 1): 9.0}
    runs = [a_run("a", *key, [99.0, value], [value]) for key, value in seconds.items()]
    assert values_of(runs, TIME) == (2.0, 7.0)
    assert values_of(runs[:2], TIME) == (1.0, 3.0)
    assert values_of(runs[:2], REWARD) == (2.0,), "repeats of one seed are the same draw of rewards"
    assert values_of([*runs, a_run("a", 2, 0, [1.0, 1.0], [])], REWARD) is None


def test_time_is_of_whole_cycles_of_sampling() -> None:
    options = {"steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 4}
    run = a_run("a", 0, 0, [50.0, 1.0, 9.0, 1.0, 9.0, 1.0, 99.0, 1.0], [], **options)
    assert run.cycle == 2
    assert run.seconds_per_step == 5.0, "the median of means of two, without the last, half cycle"
    assert a_run("a", 0, 0, [50.0, 1.0, 2.0, 9.0], []).seconds_per_step == 2.0


def test_the_last_quarter_of_rewards() -> None:
    runs = [a_run("a", seed, 0, [1.0] * 8, [0.0] * 6 + [1.0, 3.0]) for seed in (0, 1)]
    assert (values_of(runs, REWARD), values_of(runs, LATE_REWARD)) == ((0.5, 0.5), (2.0, 2.0))


def test_notes_tell_what_else_differs(tmp_path: Path) -> None:
    sides = tuple(Side(name=name, command=("python", "-m", "x")) for name in ("a", "b"))
    runs = (a_run("a", 0, 0, [1.0, 1.0], [0.1], beta=0.1), a_run("b", 0, 0, [1.0, 1.0, 1.0], [0.1], beta=0.2))
    runs[1].record["machine"]["load_at_end"][0] = 4.0
    for run, tokens in zip(runs, (10, 12), strict=True):
        run.training["logs"][0]["num_tokens"] = tokens
    notes = "\n".join(BenchReport(sides=(sides[0], sides[1]), runs=runs).notes)
    for part in (
        "tokens seen were 10 and 12",
        "steps: 2 and 3",
        "load average of up to 4.0 on 2",
        "beta: 0.1 in a, 0.2",
    ):
        assert part in notes


# Commands


def test_a_command_is_filled_and_recorded(script: Path) -> None:
    side = Side.parse(
        f"new=OMP_NUM_THREADS=2 A='b c' {sys.executable} -X dev -u {script} --json '{{\"r\": 8}}' -s={{seed}} {{out}}"
    )
    variables, words = side.filled(seed=3, out=Path("/o"), record=Path("/r"))
    assert variables == {"OMP_NUM_THREADS": "2", "A": "b c"}
    recorded = [sys.executable, "-X", "dev", "-u", str(RECORDER), "--to", "/r", str(script)]
    assert words == [*recorded, "--json", '{"r": 8}', "-s=3", "/o"]
    assert side.takes_seed
    module = Side.parse("m=python -m pack.train x").filled(seed=3, out=Path("/o"), record=Path("/r"))[1]
    assert module == ["python", str(RECORDER), "--to", "/r", "-m", "pack.train", "x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python x.py", "a side is NAME=COMMAND"),
        ("a=", "a side is NAME=COMMAND"),
        ("a b=python -m x", "name of side 'a b'"),
        ("..=python -m x", "name of side '..'"),
        ("a=python -m x {sed}", r"\{sed\} is not known; a command may hold \{seed\} and \{out\}"),
        ("a=torchrun x.py", "starts with `torchrun`, and only a Python interpreter"),
        ("a=A=1", "starts with nothing"),
        ("a=python -c pass", "no script or module after 'python'"),
        ("a=python -u", "no script or module after 'python'"),
        ("a=python -m", "no script or module after 'python'"),
        ("a=python3.99 -m x", "no interpreter 'python3.99'"),
        ("a=python nowhere.py", "no script 'nowhere.py'"),
        ("a=python -m 'x", "No closing quotation"),
    ],
)
def test_commands_that_cannot_be_recorded_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Side.parse(text)


@pytest.mark.parametrize(
    ("sides", "options", "message"),
    [
        (["a=python -m x {seed}"], {}, "two sides of different names are compared, not 1: a"),
        (["a=python -m x {seed}"] * 2, {}, "different names"),
        (["a=python -m x {seed}", "b=python -m x"], {}, r"side b: the command holds no \{seed\}"),
        (["a=python -m x {seed}", "b=python -m x {seed}"], {"seeds": [1, 1]}, "seeds that differ"),
        (["a=python -m x {seed}", "b=python -m x {seed}"], {"repeats": 0}, "1 repeat or more"),
    ],
)
def test_sides_that_cannot_be_compared_are_refused(
    sides: list[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run_sides([Side.parse(side) for side in sides], out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_refused(script: Path) -> None:
    sides = [Side.parse(f"{name}={sys.executable} {script} {{seed}}") for name in "ab"]
    with pytest.raises(ValueError, match="not an empty folder"):
        run_sides(sides, out=script.parent)


def test_the_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


# The recorder


def recorded(tmp_path: Path, code: str, *words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The record of a script that runs alone, in an interpreter to which vlmroll is not known."""
    (tmp_path / "alone").mkdir(exist_ok=True)
    (tmp_path / "alone" / "script.py").write_text(code, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *options, str(RECORDER), "--to", "record.json", *(words or ("alone/script.py",))]
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    return json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))


def test_a_script_runs_as_if_alone(tmp_path: Path) -> None:
    code = """
import json, sys
import report  # a file beside the script; there is one of this name beside the recorder, too
if __name__ == "__main__":
    assert sys.modules["__main__"].__file__ == __file__ and report.ours
    print(json.dumps([sys.argv, sys.path[0], "transformers" in sys.modules]), file=open("seen.json", "w"))
    sys.exit(0)
"""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "report.py").write_text("ours = True\n", encoding="utf-8")
    made = recorded(tmp_path, code, "alone/script.py", "--to", "x", "-m")
    argv, first_on_path, loaded = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert argv == ["alone/script.py", "--to", "x", "-m"]
    assert Path(first_on_path).resolve() == (tmp_path / "alone").resolve()
    assert not loaded, "a script sets environment variables before it imports transformers"
    assert (made["trainings"], made["script"]["arguments"]) == ([], argv[1:])
    assert len(made["script"]["sha256"]) == 64


def test_a_module_runs_and_secrets_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_123")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = recorded(
        tmp_path, "import sys\nassert sys.argv[1] == 'x' and __name__ == '__main__'\n", "-m", "alone.script", "x"
    )
    assert made["script"]["module"] == "alone.script"
    assert made["environment"]["OMP_NUM_THREADS"] == "1"
    assert "hf_123" not in json.dumps(made)


def test_peak_memory_is_of_the_process_alone(tmp_path: Path) -> None:
    """A large process that starts the recorder leaves no mark, but what the script itself takes is counted."""
    outer = f"""
import subprocess, sys
large = b"x" * (400 << 20)
subprocess.run([sys.executable, {str(RECORDER)!r}, "--to", "inner.json", "alone/inner.py"], check=True)
"""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "inner.py").write_text("large = b'x' * (100 << 20)\ndel large\n", encoding="utf-8")
    assert recorded(tmp_path, outer)["memory"]["process"] > 400 << 20
    inner = json.loads((tmp_path / "inner.json").read_text(encoding="utf-8"))
    assert 100 << 20 < inner["memory"]["process"] < 300 << 20


def test_commit_is_that_of_the_tracking_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    tracked, other = tmp_path / "tracked.py", tmp_path / "other.py"
    for path in (tracked, other):
        path.write_text("", encoding="utf-8")
    git("init", "-q")
    git("add", "tracked.py")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert record.checkout(tracked) == {"commit": commit, "changed": False}
    assert record.checkout(other) == {"commit": None, "changed": None}
    tracked.write_text("x = 1\n", encoding="utf-8")
    assert record.checkout(tracked) == {"commit": commit, "changed": True}


def test_the_trainer_of_this_library_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS])
    trainings: list[dict[str, Any]] = []
    record.watch_trainers(trainings)
    trainer = make_trainer("grpo", tmp_path, model="text", max_steps=3)
    trainer.train()
    (training,) = trainings
    logged = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["reward"] for log in training["logs"] if "reward" in log] == [log["reward"] for log in logged]
    assert [log["num_tokens"] for log in training["logs"] if "reward" in log] == [log["num_tokens"] for log in logged]
    assert training["configuration"]["num_generations"] == 4
    assert training["configuration_class"] == "vlmroll.config.grpo.GRPOConfig"
    own = [log["step_time"] for log in logged]
    for seconds, measured in zip(training["step_seconds"], own, strict=True):
        assert seconds > 0.7 * measured, "a step's time has its sampling in it"


# Both sides, for real


def run_bench(script: Path, waits: tuple[float, float], out: Path) -> BenchReport:
    sides = [
        Side.parse(f"{name}={sys.executable} {script} {{seed}} {wait} {{out}}")
        for name, wait in zip(("one", "two"), waits, strict=True)
    ]
    return run_sides(sides, seeds=(0, 1, 2), out=out)


@pytest.mark.distributed
def test_identical_sides_are_inside_run_to_run_variance(script: Path, tmp_path: Path) -> None:
    report = run_bench(script, (WAIT, WAIT), tmp_path / "out")
    assert report.comparison("time per step").verdict == INSIDE
    assert report.comparison("peak memory, process").verdict == INSIDE
    assert report.comparison("reward, all steps").verdict == INSIDE
    assert report.comparison("reward, all steps").estimate == 0
    assert [(run.side, run.seed) for run in report.runs] == [
        (side, seed) for seed in range(3) for side in ("one", "two")
    ]
    check_records(report, script, tmp_path / "out")


def check_records(report: BenchReport, script: Path, out: Path) -> None:
    """Each run's file holds what made it; the folder holds the table, the numbers and the picture."""
    files = sorted(path.name for path in (out / "runs").glob("*.json"))
    assert files == sorted(f"{side}-{seed}-0.json" for side in ("one", "two") for seed in range(3))
    made = json.loads((out / "runs" / "two-1-0.json").read_text(encoding="utf-8"))
    assert (made["side"], made["seed"], made["repeat"], made["command"][1]) == ("two", 1, 0, str(script))
    (training,) = made["trainings"]
    assert training["configuration"]["seed"] == 1
    assert training["configuration"]["max_steps"] == 5
    assert len(training["step_seconds"]) == 5
    assert statistics.median(training["step_seconds"]) > WAIT
    assert [log["reward"] for log in training["logs"][:5]] == [-log["loss"] for log in training["logs"][:5]]
    assert report.runs[3].num_tokens == 35
    assert made["versions"]["transformers"] == transformers.__version__
    assert made["machine"]["cores"] == os.cpu_count()
    assert made["memory"]["process"] > 100 << 20
    written = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [run["seed"] for run in written["runs"]] == [0, 0, 1, 1, 2, 2]
    assert written["comparisons"][0]["verdict"] == INSIDE
    assert (out / "report.md").read_text(encoding="utf-8") == f"{report}\n"
    picture = (out / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


@pytest.mark.distributed
def test_a_fifth_more_of_sleep_is_slower(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"{name}={sys.executable} {script} {{seed}} {wait} {{out}}" for name, wait in (("a", WAIT), ("b", 1.2 * WAIT))
    ]
    assert main(["bench", "--side", words[0], "--side", words[1], "--out", str(tmp_path / "out")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "time per step" in line]
    assert line.rstrip(" |").endswith("slower")
    written = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert 1.1 < written["comparisons"][0]["ratio"] < 1.3


def test_a_failing_run_shows_its_side_seed_and_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import sys\nif sys.argv[1] == '4': raise KeyError('no such column')\n", encoding="utf-8")
    word = f"{sys.executable} {script} {{seed}}"
    options = ["--seeds", "4", "--repeats", "2", "--out", str(tmp_path / "out")]
    assert main(["bench", "--side", f"a={word}", "--side", f"b={word}", *options]) == 1
    said = capsys.readouterr().err
    assert "side a, seed 4, repeat 0: the command ended with status 1" in said
    assert "KeyError: 'no such column'" in said
    sides = [Side.parse(f"{name}={word}") for name in "ab"]
    with pytest.raises(RunFailed, match="side a, seed 5, repeat 0: nothing was trained"):
        run_sides(sides, seeds=[5], out=tmp_path / "idle")


def test_the_package_is_light() -> None:
    code = "import sys, vlmroll.bench; print(*sorted({'matplotlib', 'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
