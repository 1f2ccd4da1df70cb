"""What is compared: a name and the command that trains."""

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

RECORDER = Path(__file__).with_name("record.py")
FORMS = "[VARIABLE=VALUE ...] PYTHON [options] (SCRIPT | -m MODULE) ARGS"
_SLOTS = ("seed", "out")
_SLOT = re.compile(r"\{([A-Za-z_]\w*)\}")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_WITH_VALUE = ("-W", "-X")


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: of letters, digits and `._-`, for tables and file names.
        command: words of the command, as a shell would split them: a Python interpreter, its options, a script (or
            `-m` and a module) and the script's arguments, with `VARIABLE=VALUE` before it for its environment. In each
            word `{seed}` becomes the seed and `{out}` a folder of the run's own.

    Raises:
        ValueError: the command cannot be recorded; the message says why.
    """

    name: str
    command: tuple[str, ...]
    _script: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name) or not self.name.strip("."):
            raise ValueError(f"the name of side {self.name!r} may hold letters, digits and ._- alone")
        unknown = [slot for word in self.command for slot in _SLOT.findall(word) if slot not in _SLOTS]
        if unknown:
            raise ValueError(
                f"side {self.name}: {{{unknown[0]}}} is not known; a command may hold {{seed}} and {{out}}"
            )
        object.__setattr__(self, "_script", self._find_script())

    @classmethod
    def parse(cls, text: str) -> "Side":
        """The side that `NAME=COMMAND` means.

        Raises:
            ValueError: the text is of another form, or the command cannot be recorded.
        """
        name, equals, command = text.partition("=")
        if not equals or not command.strip():
            raise ValueError(f"a side is NAME=COMMAND, not {text!r}")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"side {name}: {error} in {command!r}") from error
        return cls(name=name.strip(), command=tuple(words))

    @property
    def takes_seed(self) -> bool:
        """Whether the seed reaches the command."""
        return any("{seed}" in word for word in self.command)

    def filled(self, *, seed: int, out: Path, record: Path) -> tuple[dict[str, str], list[str]]:
        """Environment variables and words of the command of one run, which writes its record to `record`."""
        values = {"seed": str(seed), "out": str(out)}
        words = [_SLOT.sub(lambda found: values[found[1]], word) for word in self.command]
        first = self._num_variables()
        variables = dict(word.split("=", 1) for word in words[:first])
        recorder = [str(RECORDER), "--to", str(record)]
        return variables, [*words[first : self._script], *recorder, *words[self._script :]]

    def _num_variables(self) -> int:
        return next((i for i, word in enumerate(self.command) if not _VARIABLE.match(word)), len(self.command))

    def _find_script(self) -> int:
        """Index of the script, or of `-m`."""
        at = self._num_variables()
        rest = self.command[at:]
        if not rest or not _PYTHON.fullmatch(Path(rest[0]).name):
            given = f"`{rest[0]}`" if rest else "nothing"
            raise ValueError(
                f"side {self.name}: the command starts with {given}, and only a Python interpreter can be recorded: "
                f"{FORMS} (several processes, as by torchrun, are not recorded)"
            )
        if shutil.which(rest[0]) is None:
            raise ValueError(f"side {self.name}: there is no interpreter {rest[0]!r}")
        script = _after_options(rest)
        if script is None:
            raise ValueError(f"side {self.name}: no script or module after {rest[0]!r}: {FORMS}")
        word = rest[script]
        if word != "-m" and not _SLOT.search(word) and not Path(word).is_file():
            raise ValueError(f"side {self.name}: there is no script {word!r} (seen from {Path.cwd()})")
        return at + script


def _after_options(words: Sequence[str]) -> int | None:
    """Index of the script or `-m` in the words that start with an interpreter; None where there is none."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        if words[at] == "-" or words[at].startswith("-c"):
            return None  # code from the command line or the standard input has no file to run
        at += 2 if words[at] in _WITH_VALUE else 1
    return at if at + (at < len(words) and words[at] == "-m") < len(words) else None
