"""The tests that docs/faults.md promises exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:libs|services|tests)/[\w/.-]+\.py)::(\w+)`")


def test_every_test_that_the_page_names_is_there():
    named = NAMED.findall((ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)]
    assert missing == []


def functions(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
