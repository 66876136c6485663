"""The package declares every import as a dependency; none is only available through another package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_is_declared() -> None:
    # The plugin of vLLM runs in the server's environment, where kedge is not installed.
    paths = [path for path in (ROOT / "src").rglob("*.py") if "rollout/vllm/plugin" not in path.as_posix()]
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    foreign = {name for tree in trees for name in imported(tree)} - sys.stdlib_module_names - {"kedge"}
    foreign -= {"IPython"}  # only imported in a notebook, which has it
    assert len(foreign) > 10
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [block] = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    lines = re.findall(r'^\w+ = \[(".*")\]$', project, re.MULTILINE)  # the extras that fit on a line
    extras = [name for line in lines for name in re.findall(r'"([\w-]+)[<>=]', line)]
    declared = {normalized(name) for name in [*re.findall(r'^  "([\w.-]+)', block, re.MULTILINE), *extras]}
    homes = packages_distributions()
    assert {name for name in foreign if not declared & {normalized(home) for home in homes.get(name, [name])}} == set()
