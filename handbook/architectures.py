"""Writes docs/architectures.md from the outcomes of the registry test (`python -m tests.models.registry`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "architectures.json"

HEAD = """\
# Architectures

For anyone who picks a model: every architecture that transformers {version} loads as a causal language model or as a
classifier, and how kedge runs it.

Generated from the outcomes of `make test-all`, which loads a tiny model with random weights of each, samples from it,
trains, saves and loads it again. Log probabilities, scores and gradients must be those of plain transformers for each
row alone, without padding; an architecture that cannot be right is refused when the model is loaded.

- **rows**: *packed*: batches contain no padding. *Packed in window*: the same while no row is longer than the attention
  window. *Padded*: rows of similar length are padded. *Equal lengths*: only rows of equal length share a batch, since
  padding would change them.
- **sampling**: *packed* and *padded* as above; *by prompt length*: prompts of equal length are sampled together, since
  padding would change them. *Refused*: read token by token, the model gives other probabilities than in one pass (in
  plain transformers as well), or it has no cache that kedge knows; `kedge ppo`, `generate` and `evaluate` refuse it
  before they start.
- **drops rows**: finished responses leave the batch during sampling; otherwise they are computed until the last one
  ends.
- **checkpointing**: `runtime.activation_checkpointing` can be used.
- **critic**: *shared*: a value head on the policy; *separate*: also a separate model.
"""

POLICY = ("rows", "sampling", "drops rows", "checkpointing", "critic")
REWARD = ("rows", "can become the critic")


def architectures_page() -> str:
    """The page, as Markdown."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    policies = table["policies"]
    rewards = table["reward_models"]
    return "\n".join(
        [
            HEAD.format(version=table["transformers"]),
            "## Policies\n",
            _table(POLICY, policies, "layout", _policy),
            "### Refused\n",
            _table(("error",), policies, "refused", _error),
            "### Not tried\n",
            _table(("reason",), policies, "unbuilt", lambda entry: [entry["unbuilt"]]),
            "## Reward models\n",
            "Encoders are not causal and score whole texts only.\n",
            _table(REWARD, rewards, "layout", lambda entry: [entry["layout"], _yes(entry["critic"])]),
            "### Reward models that are refused\n",
            _table(("error",), rewards, "refused", _error),
            "### Reward models that are not tried\n",
            _table(("reason",), rewards, "unbuilt", lambda entry: [entry["unbuilt"]]),
        ]
    )


def _table(
    heads: Sequence[str], entries: Mapping[str, dict[str, Any]], key: str, cells: Callable[[dict[str, Any]], list[str]]
) -> str:
    """The entries that have the key: a row for each combination of cells, the most frequent first."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, entry in entries.items():
        if key in entry:
            names.setdefault(tuple(cells(entry)), []).append(f"`{name}`")
    rows = [(*same, ", ".join(names[same])) for same in sorted(names, key=lambda same: -len(names[same]))]
    lines = [(*heads, "architectures"), ["---"] * (len(heads) + 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _policy(entry: dict[str, Any]) -> list[str]:
    critic = "shared, separate" if entry["separate_critic"] else "shared"
    drops = "–" if entry["sampling"] == "refused" else _yes(entry["drops_rows"])
    return [entry["layout"], entry["sampling"], drops, _yes(entry["checkpointing"]), critic]


def _error(entry: dict[str, Any]) -> list[str]:
    """The line, without the name of the architecture's class that it starts with."""
    text = re.sub(r"^[A-Z]\w+ (?=computes|reads)", "", entry["refused"])
    return [text.replace("|", "\\|").replace("<", "&lt;")]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
