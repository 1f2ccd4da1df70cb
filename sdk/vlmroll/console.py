"""What a run shows in the console: a progress bar, and one short line for each log.

The loggers of `report_to` get every metric; a person at the console gets the few that tell whether it learns.
"""

from collections.abc import Mapping
from typing import Any

from transformers import ProgressCallback

_SHOWN = ("reward", "reward_std", "loss", "kl", "entropy", "grad_norm", "completions/mean_length", "step_time")
_WIDTH = 100


def short_line(step: int, max_steps: int, logs: Mapping[str, Any]) -> str:
    """The metrics of a log that are worth a look, in a line.

    Example:
        >>> short_line(10, 120, {"reward": 0.5891, "loss": -0.001, "clip_ratio/low_mean": 0.0})
        'step 10/120  reward 0.5891  loss -0.001'
    """
    where = f"step {step}/{max_steps}"
    if "train_runtime" in logs:
        return f"{where}  finished after {logs['train_runtime']:.1f} s"
    # Of evaluation every name has a prefix, such as `eval_`; names with a slash are parts of other metrics.
    prefixed = (name for name in logs if name.endswith("_reward") and "/" not in name)
    prefix = next((name.removesuffix("reward") for name in prefixed), "")
    where += f"  {prefix.rstrip('_')}" if prefix else ""
    numbers = [(name, logs[f"{prefix}{name}"]) for name in _SHOWN if f"{prefix}{name}" in logs]
    return "  ".join([where, *(f"{name.removeprefix('completions/')} {value:.4g}" for name, value in numbers)])


class ShortProgress(ProgressCallback):
    """The progress bar of transformers with a short line for each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line above the bar."""
        if state.is_world_process_zero and self.training_bar is not None and logs:
            line = short_line(state.global_step, state.max_steps, logs)
            self.training_bar.write(line.ljust(_WIDTH))
