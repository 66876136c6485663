"""`python -m handbook.notebooks [NAME ...]`: makes the notebooks of examples/notebooks from the scripts beside them.

A script is in jupytext's percent format: a cell starts with `# %%`, or, if it is text, with `# %% [markdown]`. The
notebook has the same cells with their outputs. Needs the extra `notebooks`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
TIMEOUT = 600
"""Seconds for a cell."""
MARKDOWN = " [markdown]\n"


def names() -> list[str]:
    """The notebooks that have a script."""
    return sorted(script.stem for script in FOLDER.glob("*.py"))


def notebook(script: Path) -> dict[str, Any]:
    """The notebook of a script, without outputs."""
    parts = re.split(r"^# %%", script.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    cells = [_cell(f"{script.stem}-{number}", part) for number, part in enumerate(parts, start=1)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(name: str, part: str) -> dict[str, Any]:
    if part.startswith(MARKDOWN):
        lines = part[len(MARKDOWN) :].strip().splitlines()
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    source = part.strip().splitlines(keepends=True)
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {},
        "outputs": [],
        "source": source,
    }


def executed(given: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells, which run in an empty folder.

    Raises:
        CellExecutionError: A cell failed.
    """
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    node = nbformat.reads(json.dumps(given), as_version=4)
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the debugger's notice about frozen modules
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(node, timeout=TIMEOUT, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    ran = json.loads(nbformat.writes(node))
    cells = [{**cell, "outputs": _kept(cell["outputs"])} if "outputs" in cell else cell for cell in ran["cells"]]
    return {**given, "cells": cells}


def _kept(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the progress of a run, which says how long it took, and the notice that ipywidgets are missing."""
    return [
        each
        for each in outputs
        if (each["output_type"] != "display_data" or "image/png" in each["data"])
        and "IProgress not found" not in "".join(each.get("text", ""))
    ]


def written(given: dict[str, Any]) -> str:
    """The file of a notebook."""
    return json.dumps(given, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> None:
    """Make the named notebooks, or all."""
    for name in sys.argv[1:] or names():
        made = executed(notebook(FOLDER / f"{name}.py"))
        (FOLDER / f"{name}.ipynb").write_text(written(made), encoding="utf-8")
        print(f"{name}.ipynb written")


if __name__ == "__main__":
    main()
