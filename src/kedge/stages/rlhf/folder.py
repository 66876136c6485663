"""Files that the chain itself writes: data for the stages, and the newest policy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kedge.logs.json_lines import plain_json
from kedge.system.durable import copy_tree, replaced_folder
from kedge.system.output import replace_file, writing

__all__ = ["published_policy", "write_rows"]


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """Write rows as JSON lines, so that the `config.yaml` of every stage can name its data; the path as text."""
    lines = (json.dumps(plain_json(row), ensure_ascii=False, allow_nan=False) for row in rows)
    replace_file(path, (f"{line}\n".encode("utf-8", "backslashreplace") for line in lines))
    return str(path)


@contextmanager
def published_policy(folder: Path) -> Iterator[None]:
    """Copy the newest policy to `model/` when the block ends, even by an error; `model/` is never incomplete.

    On several ranks, the folder has policies on the first one only.
    """
    try:
        yield
    finally:
        numbered = sorted(folder.glob("ppo-*/model"), key=lambda path: int(path.parent.name.removeprefix("ppo-")))
        policies = [path for path in (folder / "sft" / "model", folder / "ppo" / "model", *numbered) if path.is_dir()]
        if policies:
            model = folder / "model"  # there already, with an older policy, if the run was resumed
            with writing(model), replaced_folder(model) as part:
                copy_tree(policies[-1], part)
