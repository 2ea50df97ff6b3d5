"""The shape of the code: what is said in one place only is counted here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import ENGINES, OPTIONS

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(path.name for path in ROOT.glob("sandbox*.py"))


def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def strings(node: ast.AST) -> Iterator[ast.Constant]:
    """The text constants of a piece of code, those in f-strings too, without its docstrings."""
    doc = [statement.value for owner in ast.walk(node)
           if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef)
           for statement in owner.body[:1] if isinstance(statement, ast.Expr)]
    for found in ast.walk(node):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and found not in doc:
            yield found


def where(module: str, nodes: list[ast.Constant]) -> list[str]:
    """Places to look at, for the message of a failed test."""
    return [f"{module}:{node.lineno}: {node.value!r:.60}" for node in nodes]


# --- Engines ---


def is_driver(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and "Engine" in (node.name, *map(ast.unparse, node.bases))


def outside_drivers(module: str) -> list[ast.Constant]:
    return [text for node in parsed(module).body if not is_driver(node) for text in strings(node)]


def test_there_is_a_driver_for_each_engine() -> None:
    drivers = {node.name.lower() for node in parsed("sandbox.py").body
               if isinstance(node, ast.ClassDef) and is_driver(node)}
    assert drivers == {"engine", *ENGINES}


@pytest.mark.parametrize("module", MODULES)
def test_engines_are_named_by_their_drivers(module: str) -> None:
    names = re.compile(rf"\b({'|'.join(ENGINES)})\b", re.IGNORECASE)
    assert where(module, [s for s in outside_drivers(module) if names.search(str(s.value))]) == []


@pytest.mark.parametrize("module", MODULES)
def test_the_words_of_engines_are_their_drivers(module: str) -> None:
    """No option of theirs stands elsewhere, and no argv that begins with an engine's name."""
    inside = [text for node in parsed("sandbox.py").body if is_driver(node)
              for text in strings(node)]
    words = {text.value for text in inside if re.fullmatch("--[a-z-]+", str(text.value))}
    words -= {flag for flags, _ in OPTIONS.values() for flag in flags.split()}
    words |= {"exec", "inspect", "cp"}
    assert where(module, [s for s in outside_drivers(module) if s.value in words]) == []
    started = [node for node in ast.walk(parsed(module)) if isinstance(node, ast.List)
               and node.elts and ast.unparse(node.elts[0]) == "engine.name"]
    assert [f"{module}:{node.lineno}" for node in started] == []


# --- Modules ---


def imported(module: str, top: bool) -> set[str]:
    """Modules of ours that a module imports: at its top, or anywhere."""
    tree = parsed(module)
    nodes = tree.body if top else list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {f"{name}.py" for name in names} & set(MODULES)


def test_there_is_no_circle_of_imports() -> None:
    """Nothing imports what imports it; `serve` alone reaches up, when it is called."""
    graph = {module: imported(module, top=True) for module in MODULES}
    while leaves := {module for module, needs in graph.items() if not needs}:
        graph = {module: needs - leaves for module, needs in graph.items() if module not in leaves}
    assert not graph
    assert imported("sandbox.py", top=True) == set()
