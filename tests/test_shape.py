"""The shape of the code: one place for each thing, and what follows from it."""

import ast
import re

from conftest import ROOT

# --- Modules: what sandbox_web uses of sandbox is listed at its top ---


def used_of_sandbox(tree: ast.Module) -> set[str]:
    """The names of sandbox.py that a module imports or takes as attributes."""
    imports = {alias.name for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) and node.module == "sandbox"
               for alias in node.names}
    return imports | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                      and isinstance(node.value, ast.Name) and node.value.id == "sandbox"}


def test_what_the_service_uses_of_sandbox_is_listed_at_its_top() -> None:
    tree = ast.parse((ROOT / "sandbox_web.py").read_text())
    _, _, listed = (ast.get_docstring(tree) or "").partition("All that it uses of sandbox.py")
    rooms = "\n".join(re.findall(r"^ {4}.*", listed, re.MULTILINE))
    names = re.sub(r"\w+:", "", rooms).split()
    assert len(names) == len(set(names))
    assert set(names) == used_of_sandbox(tree) - {"__file__"}
