"""Tools for rollouts of several turns: reading the model's calls, running them, and telling it what came of them.

A tool is a typed Python function with a docstring, sync or async. It may return text, numbers, lists, structured values
and pictures:

    def zoom(left: int, top: int) -> Image.Image:
        '''Shows a part of the picture in full size.

        Args:
            left: The left edge, in pixels.
            top: The top edge, in pixels.
        '''
        return picture.crop((left, top, left + 64, top + 64))

An environment is a class whose methods are tools (`environments.py`). How a model writes its calls is told by its
tokenizer or recognised by its chat template (`formats.py`).
"""

from vlmroll.tools.calls import ResponseParser
from vlmroll.tools.environments import Environment, get_rewards, reset_all
from vlmroll.tools.formats import FORMATS
from vlmroll.tools.pool import EnvironmentPool
from vlmroll.tools.results import content_of
from vlmroll.tools.running import run_calls
from vlmroll.tools.toolbox import Tool, Toolbox
from vlmroll.tools.types import Part, Reply, ToolCall, ToolResult, defused

__all__ = [
    "FORMATS",
    "Environment",
    "EnvironmentPool",
    "Part",
    "Reply",
    "ResponseParser",
    "Tool",
    "ToolCall",
    "ToolResult",
    "Toolbox",
    "content_of",
    "defused",
    "get_rewards",
    "reset_all",
    "run_calls",
]
