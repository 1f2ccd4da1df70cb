"""The shape of the code: where things lie, how large they are, and which way the arrows point (see CONTRIBUTING.md)."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from vlmroll_processors.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("sdk", "processors")
PACKAGES = ("sdk/vlmroll", "processors/vlmroll_processors")

TOP_LEVEL = {
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "mkdocs.yml", "pyproject.toml"),
    *("assets", "docs", "examples", "processors", "sdk", "tests"),
}
TEST_COMMAND = 'python -m pip install -e ".[test]" && python -m pytest'

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MANY_PARAMETERS = {
    # Scripts for TRL pass these by name, so the signatures are TRL's.
    "GRPOTrainer.__init__": "as TRL's GRPOTrainer",
    "RLOOTrainer.__init__": "as TRL's RLOOTrainer",
    "PolicyTrainer.__init__": "the base of both, so what either accepts",
    "load_adapter": "the one door to an adapter, with an option for each thing that a run may set; all by name",
}
MAX_CONTRIBUTING_LINES = 80
WINDOW = 6
MAX_REPEATED = 0.02

# Every forward kwarg of some family but the positions that all models take, and words in the names of families.
FAMILY_KEYS = {name for family in FAMILIES for name in family.join} - {"position_ids"}
FAMILY_NAMES = (
    *("aya_?vision", "cohere", "gemma", "glm", "granite", "idefics", "internvl", "janus", "kimi", "lfm2", "llama"),
    *("llava", "mistral", "ovis", "phi4", "pixtral", "qwen", "smolvlm"),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def python_files(*roots: str) -> list[Path]:
    """The Python files below `roots`, which are named from the top of the project."""
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def at(path: Path, line: int, what: str) -> str:
    """One line of a failure report: where a rule is broken, and how."""
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def report(faults: list[str]) -> str:
    """The message of a failed rule: one fault a line."""
    return "\n".join(["", *faults])


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below `tree`, nested ones included, with its name: `Class.method`, `outer.inner`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        inner = f"{prefix}{node.name}." if isinstance(node, Definition) else prefix
        yield from functions(node, inner)


def count_lines(function: Function) -> int:
    """Lines of a function from `def` to its end, without the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def count_parameters(function: Function) -> int:
    """Parameters that a caller can name or fill, `*args` and `**kwargs` as one each, without `self` or `cls`."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if named and named[0].arg in ("self", "cls"):
        named = named[1:]
    return len(named) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def imported_roots(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first name part of every absolute import in a file, wherever it stands."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module.partition(".")[0]


def telling_lines(path: Path) -> list[tuple[int, str]]:
    """Number and text of the lines that say something: no blanks, comments, imports or lone brackets."""
    skipped: set[int] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert node.end_lineno is not None
            skipped.update(range(node.lineno, node.end_lineno + 1))
    numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    stripped = [(number, line.strip()) for number, line in numbered if number not in skipped]
    return [(number, line) for number, line in stripped if re.search(r"\w", line) and not line.startswith("#")]


def find_repeats(files: dict[Path, list[tuple[int, str]]]) -> set[tuple[Path, int]]:
    """Path and number of every line that lies in a run of `WINDOW` lines which also stands somewhere else."""
    runs: defaultdict[tuple[str, ...], list[list[tuple[Path, int]]]] = defaultdict(list)
    for path, lines in files.items():
        for start in range(len(lines) - WINDOW + 1):
            window = lines[start : start + WINDOW]
            runs[tuple(text for _, text in window)].append([(path, number) for number, _ in window])
    return {place for places in runs.values() if len(places) > 1 for run in places for place in run}


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether an `except` catches everything, or nearly."""
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)


def is_overload(node: Definition) -> bool:
    """Whether a definition is one of several `@overload` signatures, which share the docstring of the real one."""
    return any(ast.unparse(decorator).rpartition(".")[2] == "overload" for decorator in node.decorator_list)


def test_only_known_entries_at_the_top() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: local files cannot be told from files of the project")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    entries = {name.partition("/")[0] for name in listed}
    assert {name for name in entries if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_no_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()
    assert not list((ROOT / root).glob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_readme_and_ci_run_the_same_tests() -> None:
    for name in ("README.md", ".ci/run"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert TEST_COMMAND in map(str.strip, lines), f"{name} has no line: {TEST_COMMAND}"


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= MAX_CONTRIBUTING_LINES


def test_files_are_short() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*SOURCE_ROOTS)}
    faults = [at(path, 1, f"{lines} lines") for path, lines in sizes.items() if lines > MAX_FILE_LINES]
    assert not faults, report(faults)


def test_functions_are_short() -> None:
    faults = [
        at(path, function.lineno, f"{name} has {count_lines(function)} lines")
        for path in python_files(*SOURCE_ROOTS)
        for name, function in functions(parse(path))
        if count_lines(function) > MAX_FUNCTION_LINES
    ]
    assert not faults, report(faults)


def test_functions_have_few_parameters() -> None:
    faults = [
        at(path, function.lineno, f"{name} has {count_parameters(function)} parameters")
        for path in python_files(*SOURCE_ROOTS)
        for name, function in functions(parse(path))
        if count_parameters(function) > MAX_PARAMETERS and name not in MANY_PARAMETERS
    ]
    assert not faults, report(faults)


def test_arrows_point_one_way() -> None:
    """processors <- sdk <- examples, and nothing in either package knows the tests."""
    above = {path.stem for folder in ("examples", "tests") for path in (ROOT / folder).glob("*.py")}
    above |= {"examples", "tests", *SOURCE_ROOTS}
    banned = {"sdk": above, "processors": above | {"vlmroll"}}
    faults = [
        at(path, line, f"imports {name}")
        for root in SOURCE_ROOTS
        for path in python_files(root)
        for line, name in imported_roots(path)
        if name in banned[root]
    ]
    assert not faults, report(faults)


def test_sdk_names_no_family_and_no_key_of_one() -> None:
    assert {"pixel_values", "image_grid_thw", "token_type_ids", "cross_attention_mask"} <= FAMILY_KEYS
    pattern = re.compile("|".join((*FAMILY_KEYS, *FAMILY_NAMES, "rope_deltas")), re.IGNORECASE)
    faults = [
        at(path, number, f"names {found.group()}")
        for path in python_files("sdk")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (found := pattern.search(line)) is not None
    ]
    assert not faults, report(faults)


def test_little_is_repeated() -> None:
    files = {path: telling_lines(path) for path in python_files(*SOURCE_ROOTS)}
    repeats = find_repeats(files)
    share = len(repeats) / max(1, sum(map(len, files.values())))
    assert share < MAX_REPEATED, report([at(path, line, "repeated") for path, line in sorted(repeats)])


def test_repeats_are_found(tmp_path: Path) -> None:
    """The finder sees through indentation, blanks and comments, and leaves runs of five lines alone."""
    run = [f"value_{i} = {i}" for i in range(WINDOW)]
    texts = {
        "plain.py": "\n".join(run),
        "spread.py": "def f():\n" + "\n".join(f"    {line}\n\n    # why" for line in run),
        "five.py": "\n".join([*run[1:], "other = 0"]),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    repeats = find_repeats({tmp_path / name: telling_lines(tmp_path / name) for name in texts})
    assert {path.name for path, _ in repeats} == {"plain.py", "spread.py"}
    assert len(repeats) == 2 * WINDOW


def test_no_broad_except() -> None:
    faults = [
        at(path, node.lineno, "catches everything")
        for path in python_files(*SOURCE_ROOTS)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]
    assert not faults, report(faults)


def test_public_things_have_docstrings() -> None:
    faults: list[str] = []
    for path in python_files(*PACKAGES):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        tree = parse(path)
        named = [node for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")]
        faults += [at(path, 1, "module without a docstring")] if ast.get_docstring(tree) is None else []
        faults += [
            at(path, node.lineno, f"{node.name} has no docstring")
            for node in named
            if ast.get_docstring(node) is None and not is_overload(node)
        ]
    assert not faults, report(faults)
