"""The round that a checkpoint was made in: its rollouts, written beside the weights.

A round is trained on in several steps, so a run that stops inside one must go on with the same completions. They are
stored as numbers in JSON (floats are written exactly); prompts and their pictures are not stored but encoded again from
their dataset rows, which gives the same values. What environments and tools have added is stored with them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmroll.saved_turns import parts_from_json, parts_to_json, turns_from_json, turns_to_json
from vlmroll.starts import Opener
from vlmroll.types import Completion, Rollout
from vlmroll_processors import Continuation, ProcessorAdapter, Prompt
from vlmroll_processors.rendering import template_kwargs_of
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
            "turns": None if rollout.completion.turns is None else turns_to_json(rollout.completion.turns),
            "observation": parts_to_json(rollout.observation),
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
    folder: str | Path,
    rank: int,
    *,
    epoch: int,
    number: int,
    row_of: Callable[[int], Row],
    opener: Opener,
) -> Round | None:
    """The round saved in a checkpoint, or None when the checkpoint holds another round or none.

    Args:
        row_of: a row's number -> the dataset row.
        opener: made prompts of the rows, and does so again.

    Raises:
        ValueError: a row gives another prompt now, or later turns of a completion cannot be made again.
    """
    path = _path(folder, rank)
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    if (content["epoch"], content["round"]) != (epoch, number):
        return None
    records: Sequence[dict[str, Any]] = content["rollouts"]
    rows = {row_id: row_of(row_id) for row_id in dict.fromkeys(record["row_id"] for record in records)}
    # Siblings share a prompt, unless an environment told them different things.
    opened = {(record["row_id"], json.dumps(record.get("observation", []))): record for record in records}
    asked = [
        opener.asked(rows[row_id], row_id, parts_from_json(record.get("observation", ())))
        for (row_id, _), record in opened.items()
    ]
    prompts = dict(zip(opened, opener.adapter.encode(asked, [row_id for row_id, _ in opened]), strict=True))
    rollouts: list[Rollout] = []
    made: dict[Any, Continuation] = {}
    for record in records:
        row_id, observation = record["row_id"], record.get("observation", [])
        prompt = prompts[row_id, json.dumps(observation)]
        if record["prompt"] != _digest(prompt):
            raise ValueError(
                f"row {row_id}: its prompt is not the one that {folder} has completions of; resume with the same "
                "dataset, or from a checkpoint at the end of a round"
            )
        rollouts.append(
            Rollout(
                prompt=prompt,
                completion=_completion(record, rows[row_id], prompt, opener.adapter, made),
                row=rows[row_id],
                row_id=row_id,
                group=record["group"],
                observation=parts_from_json(observation),
                rewards=record["rewards"],
                reward=float("nan") if record["reward"] is None else record["reward"],
                advantage=record["advantage"],
                **_scores(record),
            )
        )
    return Round(epoch=epoch, number=number, rollouts=tuple(rollouts))


def _completion(
    record: Mapping[str, Any], row: Row, prompt: Prompt, adapter: ProcessorAdapter, made: dict[Any, Continuation]
) -> Completion:
    ids, turns, where = tuple(record["completion_ids"]), record.get("turns"), f"row {record['row_id']}"
    try:
        options = template_kwargs_of(row, where=where)
        again = None if turns is None else turns_from_json(turns, prompt, ids, adapter, options, made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Completion(
        completion_ids=ids,
        logprobs=_or_nan(record["logprobs"]),
        finish_reason=record["finish_reason"],
        policy_version=record["policy_version"],
        truncated=record.get("truncated", False),
        turns=again,
    )
