"""How big things may get, and that every public name is documented."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("lit_collect", "trainers") for path in (ROOT / folder).rglob("*.py"))

MAX_FILE_LINES = 500
MAX_BODY_LINES = 60
MAX_PARAMETERS = 9
MAX_CONSTRUCTOR_PARAMETERS = 12
MAX_POSITIONAL_IN_CONSTRUCTORS = 2
WIDER_CONSTRUCTORS = {"CollectorDataModule": 15, "PPO": 14, "A2C": 14, "DQN": 13}
UNDOCUMENTED_DECORATORS = {"override", "overload", "setter"}  # they repeat a name that is documented elsewhere

Function = ast.FunctionDef | ast.AsyncFunctionDef
in_every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(tree: ast.AST) -> Iterator[tuple[str, Function]]:
    """Every function with the name of its class in front."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node.name, node
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for name, function in functions(node):
            yield prefix + name, function


def classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def has_docstring(node: ast.Module | ast.ClassDef | Function) -> bool:
    return bool((ast.get_docstring(node) or "").strip())


def body_lines(function: Function) -> int:
    """Lines of a body, its docstring left out."""
    body = function.body[1:] if has_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def parameters(function: Function) -> tuple[list[str], list[str]]:
    """Positional and keyword-only parameters, without self and cls."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    return positional, [argument.arg for argument in arguments.kwonlyargs]


def decorators(node: ast.ClassDef | Function) -> dict[str, list[ast.keyword]]:
    """Last part of the name of each decorator, with the keywords it was called with."""
    found = {}
    for decorator in node.decorator_list:
        call = isinstance(decorator, ast.Call)
        target = decorator.func if call else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        found[name] = decorator.keywords if call else []
    return found


def is_true(keywords: list[ast.keyword], name: str) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True for k in keywords)


def is_parameter(node: ast.stmt) -> bool:
    """Whether a statement of a dataclass is a field that its constructor takes."""
    if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
        return False
    keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(k.arg == "init" and isinstance(k.value, ast.Constant) and k.value.value is False for k in keywords)


def constructor(node: ast.ClassDef) -> tuple[list[str], list[str]]:
    """Positional and keyword-only parameters of a class's own constructor, written or made by `dataclass`."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return parameters(item)
    keywords = decorators(node).get("dataclass")
    if keywords is None:
        return [], []
    fields = [item.target.id for item in node.body if is_parameter(item)]
    return ([], fields) if is_true(keywords, "kw_only") else (fields, [])


@in_every_file
def test_file_stays_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@in_every_file
def test_function_bodies_stay_short(path: Path) -> None:
    lengths = {f"{name}:{function.lineno}": body_lines(function) for name, function in functions(parse(path))}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_BODY_LINES} == {}


@in_every_file
def test_functions_take_few_parameters(path: Path) -> None:
    counts = {
        f"{name}:{function.lineno}": sum(map(len, parameters(function)))
        for name, function in functions(parse(path))
        if function.name != "__init__"
    }
    assert {name: count for name, count in counts.items() if count > MAX_PARAMETERS} == {}


@in_every_file
def test_constructors_take_few_parameters(path: Path) -> None:
    counts = {node.name: sum(map(len, constructor(node))) for node in classes(parse(path))}
    allowed = {name: WIDER_CONSTRUCTORS.get(name, MAX_CONSTRUCTOR_PARAMETERS) for name in counts}
    assert {name: count for name, count in counts.items() if count > allowed[name]} == {}


@in_every_file
def test_public_constructors_are_keyword_only_after_the_second_parameter(path: Path) -> None:
    public = [node for node in classes(parse(path)) if not node.name.startswith("_")]
    positional = {node.name: constructor(node)[0] for node in public}
    assert {name: names for name, names in positional.items() if len(names) > MAX_POSITIONAL_IN_CONSTRUCTORS} == {}


@in_every_file
def test_public_names_are_documented(path: Path) -> None:
    missing: list[str] = []

    def visit(node: ast.Module | ast.ClassDef | Function, name: str) -> None:
        if not has_docstring(node):
            missing.append(name)
        for child in node.body if not isinstance(node, Function) else []:
            if (
                isinstance(child, ast.ClassDef | Function)
                and not child.name.startswith("_")
                and not UNDOCUMENTED_DECORATORS & decorators(child).keys()
            ):
                visit(child, f"{name}.{child.name}")

    visit(parse(path), path.stem)
    assert missing == []
