"""How the completions of a round are shared out over processes and steps. Pure arithmetic, no config and no torch.

sizes = StepSizes(per_device=4, num_processes=2, accumulation=3)
plan_round(sizes, None, None)  # (24, 3): 24 completions, trained on in 3 micro-steps
check_groups(sizes, 24, 8)  # whole groups; 7 instead of 8 would raise and propose 6 or 8
"""

import math
from dataclasses import dataclass


class Derived(int):
    """A number that a config worked out because nobody gave it.

    `dataclasses.replace` hands it to the new config, where it counts as not given and is worked out anew.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Completions of one process in a micro-step, number of processes, micro-steps of an optimizer step."""

    per_device: int
    num_processes: int
    accumulation: int

    @property
    def micro_step(self) -> int:
        """Completions of one micro-step over all processes."""
        return self.per_device * self.num_processes


def plan_round(sizes: StepSizes, batch_size: int | None, num_steps: int | None) -> tuple[int, int]:
    """Completions and micro-steps of one generation round, from what was given of the two.

    Raises ValueError when both are given and disagree, or when the completions are not a whole number of micro-steps.
    """
    batch_size = None if isinstance(batch_size, Derived) else batch_size
    num_steps = None if isinstance(num_steps, Derived) else num_steps
    for name, given in (("generation_batch_size", batch_size), ("steps_per_generation", num_steps)):
        if given is not None and given < 1:
            raise ValueError(f"{name}={given} cannot be used: it must be at least 1")
    if batch_size is None:
        steps = Derived(sizes.accumulation) if num_steps is None else num_steps
        return Derived(sizes.micro_step * steps), steps
    if num_steps is not None and batch_size != sizes.micro_step * num_steps:
        raise ValueError(
            f"generation_batch_size={batch_size} and steps_per_generation={num_steps} exclude each other ({num_steps} "
            f"micro-steps have {sizes.micro_step * num_steps} completions); set one and leave the other out"
        )
    if batch_size % sizes.micro_step:
        raise ValueError(
            f"generation_batch_size={batch_size} must be a multiple of {sizes.micro_step}, the completions of one "
            f"micro-step (per_device_train_batch_size={sizes.per_device} on {count_processes(sizes)}). "
            f"Set generation_batch_size to {either(nearest_multiples(batch_size, sizes.micro_step))}."
        )
    return batch_size, Derived(batch_size // sizes.micro_step) if num_steps is None else num_steps


def check_groups(sizes: StepSizes, batch_size: int, num_generations: int, steps: int | None = None) -> None:
    """Raise ValueError, with values that would do, unless a round of `batch_size` completions has whole groups.

    `steps` is steps_per_generation where the user gave it; None: gradient_accumulation_steps is what to change.
    """
    if batch_size % num_generations == 0:
        return
    num_steps = batch_size // sizes.micro_step
    steps_name = "gradient_accumulation_steps" if steps is None else "steps_per_generation"
    per_device_unit = whole_unit(num_generations, sizes.num_processes * num_steps)
    steps_unit = whole_unit(num_generations, sizes.micro_step)
    changes = [
        ("num_generations", nearest_divisors(batch_size, num_generations)),
        ("per_device_train_batch_size", nearest_multiples(sizes.per_device, per_device_unit)),
    ]
    if isinstance(batch_size, Derived):
        changes.append((steps_name, nearest_multiples(num_steps, steps_unit)))
    else:  # with a given size of the round, the steps follow from it
        changes[1] = ("generation_batch_size", nearest_multiples(batch_size, steps_unit * sizes.micro_step))
    raise ValueError(
        f"generation_batch_size={batch_size} (per_device_train_batch_size={sizes.per_device} on "
        f"{count_processes(sizes)} for {num_steps} micro-step{'s' if num_steps > 1 else ''}) must be a multiple of "
        f"num_generations={num_generations}, or a group would be cut. {propose(changes)}"
    )


def check_eval_groups(sizes: StepSizes, num_generations: int) -> None:
    """Raise ValueError, with values that would do, unless an evaluation batch has whole groups."""
    if sizes.micro_step % num_generations == 0:
        return
    unit = whole_unit(num_generations, sizes.num_processes)
    changes = [
        ("num_generations_eval", nearest_divisors(sizes.micro_step, num_generations, least=1)),
        ("per_device_eval_batch_size", nearest_multiples(sizes.per_device, unit)),
    ]
    raise ValueError(
        f"the {sizes.micro_step} completions of an evaluation batch (per_device_eval_batch_size={sizes.per_device} on "
        f"{count_processes(sizes)}) must be a multiple of the {num_generations} completions of a prompt in evaluation "
        f"(num_generations_eval, or num_generations without it). {propose(changes)}"
    )


def whole_unit(num_generations: int, factor: int) -> int:
    """The least number that gives whole groups when multiplied with `factor`, as do its multiples."""
    return num_generations // math.gcd(num_generations, factor)


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit`, greater than 0, next to `value` on either side."""
    below = value // unit * unit
    return [number for number in (below, below + unit) if number > 0]


def nearest_divisors(total: int, wanted: int, least: int = 2) -> list[int]:
    """The divisors of `total`, at least `least`, next to `wanted` on either side."""
    divisors = [number for number in range(least, total + 1) if total % number == 0]
    below, above = [n for n in divisors if n <= wanted], [n for n in divisors if n > wanted]
    return below[-1:] + above[:1]


def propose(changes: list[tuple[str, list[int]]]) -> str:
    """A sentence that lists the values that would do, for each option that has any."""
    return "Set " + ", or ".join(f"{name} to {either(values)}" for name, values in changes if values) + "."


def either(values: list[int]) -> str:
    """`[4, 8]` as "4 or 8"."""
    return " or ".join(str(value) for value in values)


def count_processes(sizes: StepSizes) -> str:
    """The number of processes in words."""
    return "1 process" if sizes.num_processes == 1 else f"{sizes.num_processes} processes"
