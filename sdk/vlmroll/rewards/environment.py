"""Rewards that environments give themselves."""

from collections.abc import Sequence

from vlmroll.tools.environments import Environment, get_rewards


class EnvironmentReward:
    """What `get_reward` of the environments of one class returns; None for rollouts in others.

    Args:
        name: of the class, under which the reward is logged.
        seconds: time limit of a call; None for none.
    """

    def __init__(self, name: str, seconds: float | None = None) -> None:
        self.__name__ = name
        self._seconds = seconds

    def __call__(self, environments: Sequence[Environment], row_ids: Sequence[int]) -> list[float | None]:
        """A reward for each rollout.

        Args:
            environments: where each of them took place.
            row_ids: of their rows, for error messages.

        Raises:
            ValueError: an environment gave something else than a finite number or None.
            TimeoutError: one did not answer in time.
        """
        own = [i for i, environment in enumerate(environments) if environment.name == self.__name__]
        places, where = [environments[i] for i in own], [f"row {row_ids[i]}" for i in own]
        found = dict(zip(own, get_rewards(places, seconds=self._seconds, where=where), strict=True))
        return [found.get(i) for i in range(len(environments))]
