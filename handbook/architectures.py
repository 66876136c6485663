"""Writes docs/architectures.md from the outcomes of the registry test (`python -m tests.models.registry`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["architectures_page"]

TABLE = Path(__file__).parent / "architectures.json"

HEAD = """\
# Architectures

Every architecture that transformers {version} loads as a causal language model or as a classifier, and what kedge does
with it. For each one a tiny model with random weights is built, with every kind of layer that the architecture has. As
a policy it is loaded, read, sampled from until some responses end early, trained for one PPO update with and without
activation checkpointing, saved and loaded again; as a reward model it is loaded, scored from, trained on and saved.
Log probabilities, scores and gradients must be those of plain transformers for each row alone, without padding. What
cannot be right is refused when the model is loaded, with one line.

The tests run all of this (`make test-all`); this page is generated from their outcomes.

- **rows**: *packed*: batches contain no padding. *Packed in window*: the same while no row is longer than the attention
  window. *Padded*: rows of similar length are padded. *Equal lengths*: only rows of equal length share a batch, since
  padding would change them.
- **sampling**: *packed* and *padded* as above; *by prompt length*: prompts of equal length are sampled together, since
  padding would change them. *Refused*: read token by token, the model gives other probabilities than in one pass (in
  plain transformers, too), or it has no cache that kedge knows; `kedge ppo`, `generate` and `evaluate` refuse it before
  they start.
- **drops rows**: finished responses leave the batch during sampling; otherwise they are computed until the last one
  ends.
- **checkpointing**: `runtime.activation_checkpointing` can be used.
- **critic**: *shared*: a value head on the policy; *separate*: also a model of its own.
"""

POLICY = """\
| architecture | rows | sampling | drops rows | checkpointing | critic |
|---|---|---|---|---|---|
"""
REWARD = """\
| architecture | rows | can become the critic |
|---|---|---|
"""
REFUSED = """\
| architecture | error |
|---|---|
"""
UNBUILT = """\
| architecture | reason |
|---|---|
"""


def architectures_page() -> str:
    """The page, as Markdown."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    policies, rewards = table["policies"], table["reward_models"]
    return "\n".join(
        [
            HEAD.format(version=table["transformers"]),
            "## Policies\n",
            POLICY + _rows(policies, "layout", _policy),
            "### Refused\n",
            REFUSED + _rows(policies, "refused", lambda entry: [_error(entry)]),
            "### Not tried\n",
            UNBUILT + _rows(policies, "unbuilt", lambda entry: [entry["unbuilt"]]),
            "## Reward models\n",
            "Encoders are not causal and score whole texts only.\n",
            REWARD + _rows(rewards, "layout", lambda entry: [entry["layout"], _yes(entry["critic"])]),
            "### Reward models that are refused\n",
            REFUSED + _rows(rewards, "refused", lambda entry: [_error(entry)]),
            "### Reward models that are not tried\n",
            UNBUILT + _rows(rewards, "unbuilt", lambda entry: [entry["unbuilt"]]),
        ]
    )


def _rows(entries: Mapping[str, dict[str, Any]], key: str, cells: Any) -> str:
    """The table's rows for the entries that have the key."""
    chosen = ((f"`{name}`", *cells(entry)) for name, entry in entries.items() if key in entry)
    return "".join(_row(row) for row in chosen)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _policy(entry: dict[str, Any]) -> list[str]:
    critic = "shared, separate" if entry["separate_critic"] else "shared"
    drops = "–" if entry["sampling"] == "refused" else _yes(entry["drops_rows"])
    return [entry["layout"], entry["sampling"], drops, _yes(entry["checkpointing"]), critic]


def _error(entry: dict[str, Any]) -> str:
    return entry["refused"].replace("|", "\\|").replace("<", "&lt;")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
