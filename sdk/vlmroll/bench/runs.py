"""One run, read from its record, and what it says about time, memory and reward."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmroll.bench.verdicts import Measure

_MIB = 2**20

TIME = Measure(name="time per step", unit="s", below="faster", above="slower", is_ratio=True, least=0.01)
MEMORY = Measure(name="peak memory, process", unit="MiB", below="less", above="more", is_ratio=True, least=0.01)
DEVICE = Measure(name="peak memory, device", unit="MiB", below="less", above="more", is_ratio=True, least=0.01)
REWARD = Measure(name="reward, all steps", unit="", below="lower", above="higher", is_ratio=False, least=1e-6)
LATE_REWARD = Measure(name="reward, last quarter", unit="", below="lower", above="higher", is_ratio=False, least=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training of one side.

    Attributes:
        side: name of the side.
        seed, repeat: which of its runs; repeats count from 0.
        warmup_steps: steps at the beginning that no time is taken of.
        record: what the recorder wrote, with `side`, `seed`, `repeat` and `command`.

    Raises:
        ValueError: no trainer was trained in the run, or there are no steps besides those of the warm-up.
    """

    side: str
    seed: int
    repeat: int
    warmup_steps: int
    record: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.record["trainings"]:
            raise ValueError(f"{self.title}: nothing was trained by a transformers.Trainer in this process")
        steps = len(self.training["step_seconds"])
        if steps <= self.warmup_steps:
            raise ValueError(
                f"{self.title}: of {steps} steps {self.warmup_steps} are left out as warm-up; "
                "train longer, or leave out fewer"
            )

    @property
    def title(self) -> str:
        """Which run it is, for people."""
        return f"side {self.side}, seed {self.seed}, repeat {self.repeat}"

    @property
    def training(self) -> Mapping[str, Any]:
        """The training that counts: the last one of the script."""
        return self.record["trainings"][-1]

    @property
    def step_seconds(self) -> list[tuple[int, float]]:
        """Step -> seconds, after the warm-up."""
        numbered = enumerate(self.training["step_seconds"], start=self.training["first_step"])
        return list(numbered)[self.warmup_steps :]

    @property
    def cycle(self) -> int:
        """Steps after which the kind of work repeats: sampling serves several steps where the options say so."""
        options = self.training["configuration"]
        micro = (options.get("steps_per_generation") or 1) * (options.get("num_iterations") or 1)
        accumulated = options.get("gradient_accumulation_steps") or 1
        return micro // math.gcd(micro, accumulated)

    @property
    def seconds_per_step(self) -> float:
        """Mean within each whole cycle of steps, and of these the median, which a disturbed step does not move."""
        seconds = [value for _, value in self.step_seconds]
        size = min(self.cycle, len(seconds))
        means = [statistics.fmean(seconds[i : i + size]) for i in range(0, len(seconds) - size + 1, size)]
        return statistics.median(means)

    @property
    def memory(self) -> float:
        """Peak of the process, MiB."""
        return self.record["memory"]["process"] / _MIB

    @property
    def device_memory(self) -> float | None:
        """Peak of the most used CUDA device, MiB; None where there is none."""
        devices = self.record["memory"]["devices"]
        return max(devices) / _MIB if devices and max(devices) else None

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """Step and reward, of every log that holds one."""
        return [(log["step"], log["reward"]) for log in self.training["logs"] if log.get("reward") is not None]

    @property
    def num_tokens(self) -> float | None:
        """Tokens seen until the end, where the trainer counts them."""
        counts = [log["num_tokens"] for log in self.training["logs"] if log.get("num_tokens") is not None]
        return counts[-1] if counts else None


def measured(measure: Measure) -> Callable[[Run], float | None]:
    """How a measure is read from a run; None where the run has no such value."""
    return _READERS[measure.name]


def values_of(runs: Sequence[Run], measure: Measure) -> tuple[float, ...] | None:
    """One value for each run that counts, of one side's runs; None where a run has none.

    With several seeds a seed is one value, the median of its repeats: runs of one seed resemble each other, so repeats
    cannot stand for further seeds. With one seed each repeat is a value for time and memory, but the reward has one.
    """
    by_seed: defaultdict[int, list[float]] = defaultdict(list)
    for run in runs:
        value = measured(measure)(run)
        if value is None:
            return None
        by_seed[run.seed].append(value)
    if len(by_seed) == 1 and measure.is_ratio:
        return tuple(next(iter(by_seed.values())))
    return tuple(statistics.median(values) for values in by_seed.values())


def _mean_reward(run: Run) -> float | None:
    return statistics.fmean(reward for _, reward in run.rewards) if run.rewards else None


def _late_reward(run: Run) -> float | None:
    rewards = [reward for _, reward in run.rewards]
    return statistics.fmean(rewards[-max(1, len(rewards) // 4) :]) if rewards else None


_READERS: Mapping[str, Callable[[Run], float | None]] = {
    TIME.name: lambda run: run.seconds_per_step,
    MEMORY.name: lambda run: run.memory,
    DEVICE.name: lambda run: run.device_memory,
    REWARD.name: _mean_reward,
    LATE_REWARD.name: _late_reward,
}
MEASURES = (TIME, MEMORY, DEVICE, REWARD, LATE_REWARD)
