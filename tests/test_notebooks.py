"""The notebooks: valid, as their scripts have them, with outputs; and executed, they claim what is true."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import kedge
import kedge.algorithm
from handbook.notebooks import FOLDER, executed, names, notebook

NAMES = ("a_critic_that_learns", "a_game_with_tools", "one_token")
LARGEST = 300_000
"""Bytes of a file."""
PATHS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|usr|Users|opt|var)/")


def read(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def printed(given):
    """What the cells of a notebook print, one text per cell that prints."""
    texts = ["".join(each["text"]) for cell in given["cells"] for each in cell.get("outputs", []) if "text" in each]
    return [line for text in texts for line in text.splitlines()]


def code_of(name):
    return [ast.parse("".join(cell["source"])) for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def test_every_script_has_a_notebook():
    assert tuple(names()) == NAMES
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_cells_of_its_script(name):
    kept = ("cell_type", "id", "source")
    ours, expected = ([{key: cell[key] for key in kept} for cell in given["cells"]]
                      for given in (read(name), notebook(FOLDER / f"{name}.py")))  # fmt: skip
    assert ours == expected, f"run `python -m handbook.notebooks {name}`"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_can_be_reviewed(name):
    file = FOLDER / f"{name}.ipynb"
    text = file.read_text(encoding="utf-8")
    given = json.loads(text)
    cells = given["cells"]
    assert file.stat().st_size < LARGEST
    assert (given["nbformat"], given["nbformat_minor"]) == (4, 5)
    assert given["metadata"] == notebook(FOLDER / f"{name}.py")["metadata"]  # no versions, no widgets
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(cell["metadata"] == {} for cell in cells)  # no times
    assert not PATHS.search("\n".join("".join(cell["source"]) for cell in cells) + "\n".join(printed(given)))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_been_executed_from_top_to_bottom(name):
    cells = [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]
    outputs = [each for cell in cells for each in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {each["output_type"] for each in outputs} == {"stream", "display_data"}  # no errors
    assert {each["name"] for each in outputs if each["output_type"] == "stream"} == {"stdout"}
    for cell in cells:
        source = "".join(cell["source"])
        shows = [each for each in cell["outputs"] if "image/png" in each.get("data", {})]
        assert len(shows) == source.count("plt.show()")
        if re.search(r"^print\(", source, re.MULTILINE):
            assert any(each["output_type"] == "stream" for each in cell["outputs"])


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid(name):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.from_dict(read(name)))


@pytest.mark.parametrize("name", NAMES)
def test_only_public_names_are_used(name):
    public = {"kedge": set(kedge.__all__), "kedge.algorithm": set(kedge.algorithm.__all__)}
    for tree in code_of(name):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                ours = [each.name for each in node.names if each.name.startswith("kedge")]
                assert set(ours) <= {"kedge"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kedge"):
                assert {each.name for each in node.names} <= public[str(node.module)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kedge":
                assert node.attr in public["kedge"]


def test_a_script_is_split_into_cells(tmp_path: Path):
    script = tmp_path / "two.py"
    script.write_text("# %% [markdown]\n# # Title\n#\n# Text\n\n# %%\nimport math\n\n\n# %%\nprint(math.pi)\n")
    text, first, second = notebook(script)["cells"]
    assert (text["cell_type"], "".join(text["source"])) == ("markdown", "# Title\n\nText")
    assert ("".join(first["source"]), "".join(second["source"])) == ("import math", "print(math.pi)")
    assert [cell["id"] for cell in (text, first, second)] == ["two-1", "two-2", "two-3"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter's own
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_its_claims_hold(name):
    pytest.importorskip("nbclient")
    made = executed(notebook(FOLDER / f"{name}.py"))  # the last cells of two of them assert their claims
    if name == "one_token":
        assert printed(made) == printed(read(name))
    else:
        assert printed(made)[-1] == "all hold"
