"""The round that a checkpoint was made in: its rollouts, written beside the weights.

A round is trained on in several steps, so a run that stops inside one must go on with the same completions. They are
stored as numbers in JSON (floats are written exactly); prompts and pictures are not stored but encoded again from their
dataset rows, which gives the same values.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmroll.types import Completion, Rollout
from vlmroll_processors import ProcessorAdapter, Prompt
from vlmroll_processors.types import Row

_SCORES = ("old_logprobs", "ref_logprobs", "entropies", "loss_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The rollouts of one round on this process; `epoch` and `number` say which."""

    epoch: int
    number: int
    rollouts: tuple[Rollout, ...]


def _path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rollouts_rank{rank}.json"


def save_round(current: Round, folder: str | Path, rank: int, plan: Mapping[str, Any]) -> None:
    """Write the round of this process into a checkpoint, with the options that it was made under."""
    records = [
        {
            "row_id": rollout.row_id,
            "prompt": _digest(rollout.prompt),
            "group": rollout.group,
            "completion_ids": rollout.completion.completion_ids,
            "logprobs": _or_null(rollout.completion.logprobs),
            "finish_reason": rollout.completion.finish_reason,
            "policy_version": rollout.completion.policy_version,
            "truncated": rollout.completion.truncated,
            "rewards": dict(rollout.rewards),
            "reward": None if rollout.reward != rollout.reward else rollout.reward,
            "advantage": rollout.advantage,
            "mismatch": None if rollout.mismatch is None else _or_null(rollout.mismatch),
            **{name: getattr(rollout, name) for name in _SCORES},
        }
        for rollout in current.rollouts
    ]
    content = {"epoch": current.epoch, "round": current.number, "plan": dict(plan), "rollouts": records}
    _path(folder, rank).write_text(json.dumps(content, allow_nan=False))


def _or_null(values: Sequence[float]) -> list[float | None]:
    """What an engine reported, or did not: JSON has no NaN."""
    return [value if math.isfinite(value) else None for value in values]


def _or_nan(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(float("nan") if value is None else value for value in values)


def _digest(prompt: Prompt) -> str:
    """Ids and pictures of a prompt, in short."""
    content = repr((prompt.prompt_ids, [medium.key for medium in (*prompt.images, *prompt.videos)]))
    return hashlib.sha256(content.encode()).hexdigest()


def check_plan(folder: str | Path, rank: int, plan: Mapping[str, Any]) -> None:
    """Refuse to go on inside a round with options that it was not made under.

    Raises:
        ValueError: names the option, its value then and now.
    """
    path = _path(folder, rank)
    saved: Mapping[str, Any] = json.loads(path.read_text())["plan"] if path.is_file() else plan
    for name, value in plan.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{folder} was made inside a generation round with {name}={saved.get(name)!r}, now it is {value!r}; "
                "resume with the same, or from a checkpoint at the end of a round"
            )


def _scores(record: Mapping[str, Any]) -> dict[str, Any]:
    scores = {name: None if record[name] is None else tuple(record[name]) for name in _SCORES}
    mismatch = record.get("mismatch")  # not in checkpoints of the first release
    return scores | {"mismatch": None if mismatch is None else _or_nan(mismatch)}


def load_round(
    folder: str | Path, rank: int, *, epoch: int, number: int, row_of: Callable[[int], Row], adapter: ProcessorAdapter
) -> Round | None:
    """The round saved in a checkpoint, or None when the checkpoint holds another round or none.

    Args:
        row_of: a row's number -> the dataset row.
        adapter: encodes the prompts again.
    """
    path = _path(folder, rank)
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    if (content["epoch"], content["round"]) != (epoch, number):
        return None
    records: Sequence[dict[str, Any]] = content["rollouts"]
    row_ids = list(dict.fromkeys(record["row_id"] for record in records))
    rows = {row_id: row_of(row_id) for row_id in row_ids}
    prompts = dict(zip(row_ids, adapter.encode(list(rows.values()), row_ids), strict=True))
    for record in records:
        if record["prompt"] != _digest(prompts[record["row_id"]]):
            raise ValueError(
                f"row {record['row_id']}: its prompt is not the one that {folder} has completions of; resume with the "
                "same dataset, or from a checkpoint at the end of a round"
            )
    rollouts = tuple(
        Rollout(
            prompt=prompts[record["row_id"]],
            completion=Completion(
                completion_ids=tuple(record["completion_ids"]),
                logprobs=_or_nan(record["logprobs"]),
                finish_reason=record["finish_reason"],
                policy_version=record["policy_version"],
                truncated=record.get("truncated", False),
            ),
            row=rows[record["row_id"]],
            row_id=record["row_id"],
            group=record["group"],
            rewards=record["rewards"],
            reward=float("nan") if record["reward"] is None else record["reward"],
            advantage=record["advantage"],
            **_scores(record),
        )
        for record in records
    )
    return Round(epoch=epoch, number=number, rollouts=rollouts)
