"""Descriptions of stages, and stages of other packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kedge_base.stage import imported, stages

DESCRIPTION = """
from kedge_base.stage import Flag, Stage

WALK = Stage(
    "walk",
    help="Teach a robot to walk.",
    run="kedge_walk.training:run_walk",
    sections=(("walk",), ("runtime",)),
    adds_sections={"walk": "kedge_walk.settings:WalkConfig"},
    presets="kedge_walk.presets:PRESETS",
    needs={"walk.robot": "--robot"},
    flags=(Flag(("--robot",), "walk.robot", "NAME", "The robot."),),
    best_metrics={"distance": True},
    length="walk.steps",
    python={"walk": "kedge_walk.training:walk"},
)
BROKEN = 3
"""

SETTINGS = """
from kedge.config.schema.section import Section


class WalkConfig(Section):
    \"\"\"Walking.\"\"\"

    robot: str | None = None
    \"\"\"The robot.\"\"\"
    steps: int = 3
    \"\"\"Steps.\"\"\"
    plain: int = 1
"""

PRESETS = """
from kedge.config.presets.recipe import Cited, Preset

PRESETS = (Preset("stroll", "A slow walk.", {"walk.steps": Cited(7, "test")}),)
"""

TRAINING = """
def run_walk(config, *, resume=None, callback=None):
    print("walks", config.walk.robot, config.walk.steps, config.preset)


def walk():
    return "walked"
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package that registers two stages, one of them broken."""
    folder, metadata = tmp_path / "kedge_walk", tmp_path / "kedge_walk-1.dist-info"
    for each in (folder, metadata):
        each.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kedge-walk\nVersion: 1\n")
    entries = "walk = kedge_walk.description:WALK\nbroken = kedge_walk.description:BROKEN\n"
    (metadata / "entry_points.txt").write_text(f"[kedge.stages]\n{entries}")
    (folder / "__init__.py").write_text("import kedge.config\n")
    for name, content in (
        ("description", DESCRIPTION),
        ("settings", SETTINGS),
        ("presets", PRESETS),
        ("training", TRAINING),
    ):
        (folder / f"{name}.py").write_text(content)
    return tmp_path


def python(package: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    paths = filter(None, [str(package), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=package, env=environment, timeout=120
    )


def test_another_package_registers_a_stage(package):
    helped = python(package, "-m", "kedge", "walk", "--help")
    assert helped.returncode == 0
    assert all(word in helped.stdout for word in ("Teach a robot to walk.", "--robot", "Preset: stroll.", "--resume"))
    walked = python(package, "-m", "kedge", "walk", "--robot", "atlas", "--preset", "stroll", "--out", "run")
    assert "walks atlas 7 ['stroll']" in walked.stdout
    assert (
        python(package, "-m", "kedge", "walk", "steps=9")
        .stderr.strip()
        .endswith("kedge walk needs walk.robot: pass --robot, or set it in the configuration")
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("walk.plain", "  default   1"),
        ("bins", "ppo.value_loss"),  # a search reads the meanings of all fields
    ],
)
def test_a_plain_field_of_another_package_is_explained(package, name, line):
    shown = python(package, "-m", "kedge", "config", "explain", name)
    assert shown.returncode == 0, shown.stderr
    assert line in shown.stdout


def test_a_stage_that_cannot_be_loaded_costs_one_line(package):
    shown = python(package, "-m", "kedge", "--version")
    assert shown.returncode == 0
    assert shown.stderr == (
        "kedge: the stage broken of kedge_walk.description:BROKEN cannot be loaded: it is of type int, not a Stage\n"
    )


@pytest.mark.parametrize("first", ["kedge", "kedge_walk.settings", "kedge_walk.presets"])
def test_the_package_of_a_stage_is_imported_in_any_order(package, first):
    read = "kedge.config.load_config(None, ['steps=4'], stage='walk').walk.steps"
    code = f"import {first}, kedge.config; print(kedge.walk(), {read})"
    assert python(package, "-c", code).stdout == "walked 4\n"


def test_what_descriptions_name_exists():
    for stage in stages().values():
        named = (stage.run, stage.plan, stage.presets, *stage.adds_sections.values())
        assert all(callable(imported(name)) or isinstance(imported(name), tuple) for name in named if name)
