"""docs/life_of_a_token.md names files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "truespec"
NAMES = re.findall(
    r"`([a-z_0-9/]+\.py)(?::([A-Za-z_.0-9]+))?`",
    (ROOT / "docs" / "life_of_a_token.md").read_text(encoding="utf-8"),
)


def defined(path: Path) -> set[str]:
    """Qualified names of a file's functions, classes and methods."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return names


def test_the_page_names_every_step():
    assert len(NAMES) >= 15


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_a_named_file_and_function_exist(file, name):
    assert (PACKAGE / file).is_file()
    if name:
        assert name in defined(PACKAGE / file)
