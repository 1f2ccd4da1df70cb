"""What a trainer's `tools`, `environment_factory` and `rollout_func` come to: the parts that make its rollouts."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmroll.config import PolicyConfig
from vlmroll.config.options import describe_options
from vlmroll.episodes import Episodes
from vlmroll.generators.base import Generator, stop_ids_of
from vlmroll.own_rollouts import OwnRollouts
from vlmroll.rewards import RewardSuite
from vlmroll.rewards.environment import EnvironmentReward
from vlmroll.starts import Opener
from vlmroll.tools import EnvironmentPool, Toolbox
from vlmroll.turns import ToolLoop, special_tokens
from vlmroll_processors.adapter import FamilyAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a person gave to a trainer, checked as far as it can be without a model.

    Attributes:
        tools: functions, as for transformers' chat templates; None or empty for none.
        environment_factory: makes environments, or several factories by name; None for none.
        rollout_func: see `vlmroll.own_rollouts`; None for none.
        toolbox: the tools.
        pool: the environments; None without any.

    Raises:
        ValueError: they do not go together, or one of them is not of use; says what to give.
    """

    tools: Any = None
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    rollout_func: Callable[..., Any] | None = None
    toolbox: Toolbox = field(init=False)
    pool: EnvironmentPool | None = field(init=False)

    def __post_init__(self) -> None:
        factory, tools = self.environment_factory, () if self.tools is None else self.tools
        if self.rollout_func is not None and (tools or factory is not None):
            raise ValueError("rollout_func brings a loop of its own; leave out tools and environment_factory")
        object.__setattr__(self, "toolbox", Toolbox(tools))
        object.__setattr__(self, "pool", None if factory is None else EnvironmentPool(factory, tools=tools))

    def close_with(self, owner: Any) -> None:
        """Close the environments when nobody holds their owner any more."""
        if self.pool is not None:
            weakref.finalize(owner, self.pool.close)

    @property
    def interactive(self) -> bool:
        """Whether there is something to call."""
        return len(self.toolbox) > 0 or self.pool is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Interaction:
    """The parts.

    Attributes:
        opener: opens rows.
        episodes: makes rollouts of them.
        pool: the environments; None without any.
    """

    opener: Opener
    episodes: Episodes
    pool: EnvironmentPool | None


def make_interaction(asked: Asked, adapter: FamilyAdapter, generator: Generator, trainer: Any) -> Interaction:
    """The parts of a trainer.

    Args:
        trainer: handed to a `rollout_func`; its options and model are read.

    Raises:
        ValueError: they do not go together with the options or the model's chat template; says what to do.
    """
    args: PolicyConfig = trainer.args
    if not asked.interactive and asked.rollout_func is None:
        _refuse_unread(args)
    if asked.rollout_func is not None:
        opener, stops = Opener(adapter), stop_ids_of(trainer.model, adapter)
        own = OwnRollouts(asked.rollout_func, trainer, stops)
        return Interaction(opener=opener, episodes=Episodes(generator, opener, own=own), pool=None)
    if not asked.interactive:
        opener = Opener(adapter)
        return Interaction(opener=opener, episodes=Episodes(generator, opener), pool=None)
    toolbox, pool = asked.toolbox, asked.pool
    if pool is not None and args.long_prompts == "skip" and trainer.accelerator.num_processes > 1:
        raise ValueError(
            "long_prompts='skip' would leave a row out in one process alone, where environments tell each something "
            "else; raise max_prompt_length, or take long_prompts='raise'"
        )
    opener = Opener(adapter, toolbox, pool, args.tool_timeout, special_tokens(adapter))
    loop = ToolLoop(
        generator,
        adapter,
        max_iterations=args.max_tool_calling_iterations,
        seconds=args.tool_timeout,
        format=args.tool_call_format,
    )
    text_only = bool(getattr(generator, "text_only", False))
    _check_template(adapter, [toolbox] if pool is None else _toolboxes(pool), text_only=text_only)
    return Interaction(opener=opener, episodes=Episodes(generator, opener, loop=loop), pool=pool)


def _refuse_unread(args: PolicyConfig) -> None:
    """Refuse options of tools where there are none."""
    described = describe_options(type(args))
    for name in ("max_tool_calling_iterations", "tool_timeout", "tool_call_format"):
        if (value := getattr(args, name)) != described[name].default:
            raise ValueError(
                f"{name}={value!r}, but there are no tools; give `tools` or an `environment_factory` to the trainer, "
                "or leave it out"
            )


def _toolboxes(pool: EnvironmentPool) -> list[Toolbox]:
    """The tools of each kind of environment."""
    boxes: list[Toolbox] = []
    for kind in pool.kinds:
        environment = pool.take(kind)
        boxes.append(environment.toolbox)
        pool.give_back(environment)
    return boxes


def _check_template(adapter: FamilyAdapter, toolboxes: Sequence[Toolbox], *, text_only: bool) -> None:
    """Refuse tools whose pictures cannot be shown, and warn of a chat template that does not name the tools.

    Args:
        text_only: whether the generator reads no pictures.
    """
    if any(toolbox.returns_pictures for toolbox in toolboxes):
        if text_only:
            raise ValueError("a tool returns pictures, but the generator reads text only; take another generator")
        logger.info("pictures from tools: %s", adapter.check_tools(pictures=True))
    shown = [adapter.shows_tools(toolbox.schemas) for toolbox in toolboxes if toolbox.schemas]
    if not all(shown):
        logger.warning(
            "the chat template does not tell the model which tools there are; say it in the prompts, or give the "
            "processor a chat template that renders `tools`"
        )


def reward_suite(functions: Sequence[Any], args: PolicyConfig, pool: EnvironmentPool | None) -> RewardSuite:
    """The reward functions, with those that environments bring, each with the weight 1.

    Raises:
        ValueError: no function at all, or weights that do not fit the functions.
    """
    names, weights = () if pool is None else pool.reward_names, args.reward_weights
    of_environments = [EnvironmentReward(name, args.tool_timeout) for name in names]
    if not functions and pool is not None and not names:
        raise ValueError("nothing gives a reward; give reward_funcs, or write get_reward(self) into the environment")
    if weights is not None and of_environments:
        RewardSuite(functions, weights)  # the weights are of these alone
        weights = [*weights, *(1.0 for _ in of_environments)]
    return RewardSuite([*functions, *of_environments], weights)
