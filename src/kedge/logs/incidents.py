"""`incidents.jsonl`: what a run met that must not be learnt from, a row per incident, with the response to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Experience, Rollout
from kedge.logs.json_lines import JsonLines, plain_json, read_json_lines
from kedge.output import INCIDENTS_FILE

__all__ = ["add_incident", "describe_row", "read_incidents"]


def add_incident(folder: Path, incident: Mapping[str, Any]) -> None:
    """Add a row, and have the disk take it: the run may end the next moment. No run without incidents has the file.

    NaN and infinity, which JSON has no words for, are the texts `nan`, `inf` and `-inf` here: they are what is told.
    """
    with closing(JsonLines(folder / INCIDENTS_FILE)) as lines:
        lines.write(_spelled_out(incident))


def read_incidents(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `incidents.jsonl`; `DataError` as `read_json_lines`."""
    return read_json_lines(folder / INCIDENTS_FILE)


def describe_row(
    evidence: Rollout | Experience, row: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str | float | Sequence[str] | Sequence[float]]:
    """One response of an update with all that is known of each of its tokens.

    Args:
        evidence: The update's responses; experience where there is some already.
        row: Which one.
        tokenizer: The policy's.
    """
    rollout = evidence if isinstance(evidence, Rollout) else evidence.rollout
    mask = rollout.action_mask[row]
    tokens = rollout.response_ids[row][mask].tolist()
    figures: dict[str, Tensor | None] = {"sampler_logprobs": rollout.logprobs}
    if isinstance(evidence, Experience):
        names = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
        figures |= {name: getattr(evidence, name) for name in names}
    return {
        "prompt": str(tokenizer.decode(rollout.prompt_ids[row][rollout.prompt_mask[row]])),
        "response": str(tokenizer.decode(tokens)),
        "tokens": [str(tokenizer.decode([token])) for token in tokens],
        **({"score": float(evidence.total_scores[row])} if isinstance(evidence, Experience) else {}),
        **{name: figure[row][mask].tolist() for name, figure in figures.items() if figure is not None},
    }


def _spelled_out(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _spelled_out(entry) for name, entry in value.items()}
    return [_spelled_out(entry) for entry in value] if isinstance(value, (list, tuple)) else plain_json(value)
