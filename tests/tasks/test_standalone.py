"""Verifiers, sandbox, environments and tools work without torch, transformers and a trainer."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PARTS = (
    *(
        "kedge_tasks.environments",
        "kedge_tasks.environments.agent",
        "kedge_tasks.environments.chat",
        "kedge_tasks.environments.client",
        "kedge_tasks.environments.endpoint",
        "kedge_tasks.environments.openenv",
        "kedge_tasks.environments.session",
    ),
    *("kedge_tasks.environments.shapes", "kedge_tasks.environments.tools"),
    *("kedge_base.verdict", "kedge_tasks.confined", "kedge_tasks.sandbox"),
    *(f"kedge_tasks.verify.{path.stem}" for path in (SOURCE / "kedge_tasks/verify").glob("[a-z]*.py")),
    "kedge_tasks.verify",
    *(f"kedge_tasks.judge.{path.stem}" for path in (SOURCE / "kedge_tasks/judge").glob("[a-z]*.py")),
    "kedge_tasks.judge",
)
BELOW = ("kedge_base.errors", "kedge_base.")


@pytest.mark.parametrize("module", PARTS)
def test_a_part_imports_errors_system_and_other_parts_alone(module: str) -> None:
    path = SOURCE / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{each.name}" for each in node.names} & {*PARTS}
            found |= inner or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    ours = {name for name in found if name.startswith("kedge")}
    assert {name for name in ours - {*PARTS} if not name.startswith(BELOW)} == set()
    assert not {name.partition(".")[0] for name in found} & {"torch"}


PROGRAM = """
import importlib, sys

for module in sys.argv[2:]:
    importlib.import_module(module)
for name in ("torch", "transformers"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "is not here" in str(error)
    else:
        raise AssertionError(f"{name} can be imported")

from kedge_tasks.environments.client import Environment
from kedge_base.errors import EnvError
from kedge_tasks import verify

call = dict(prompts=["Q"] * 2, completion_ids=[[1]] * 2, answer=["#### 42"] * 2, trainer_state=None)
assert verify.gsm8k(completions=["It is 42.", "It is 41."], **call) == [1.0, 0.0]
assert verify.code(completions=["def f(x):\\n    return 2 * x"], test_list=[["assert f(2) == 4"]]) == [1.0]

world = Environment(f"{sys.argv[1]}:Guess")
assert world.open({1: ({"most": 9}, 3)})[1].messages[0]["content"] == "From 1 to 9.\\n"
assert world.step({1: "12"})[1].reward == 1.0
world.close()
try:
    Environment(f"{sys.argv[1]}:Calculator")
except EnvError as error:
    assert "needs the package transformers" in str(error), error
print("alone")
"""


@pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups")
def test_they_work_without_torch_and_transformers(tmp_path: Path) -> None:
    for name in ("torch", "transformers"):  # also for the processes that it starts
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not here')\n")
    worlds = Path(__file__).parent / "environments/worlds.py"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(worlds), *PARTS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        cwd=tmp_path,
        check=False,
    )
    assert result.stdout == "alone\n", result.stderr
