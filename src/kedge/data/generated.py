"""Generated prompts: `reasoning-gym:NAME,size=…,seed=…` stands for the rows of a reasoning-gym task.

Each row has a `question`, an `answer`, and an `entry` by which the verifier finds it again.
"""

from __future__ import annotations

from collections.abc import Iterator

from kedge_base.generated import open_entry, open_task


def generated_rows(source: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a generated source, in order; raises the errors of `open_task`."""
    task = open_task(source)
    for index in range(len(task)):
        entry = open_entry(source, index)
        yield {"question": entry["question"], "answer": str(entry["answer"]), "entry": f"{source}#{index}"}
