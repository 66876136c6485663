"""`incidents.jsonl`: non-finite values and loss spikes that a run refused to train on, one row per incident."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Experience, Rollout
from kedge.logs.experience_metrics import sides_of
from kedge.logs.json_lines import JsonLines, plain_json
from kedge_base.run_folder.output import INCIDENTS_FILE, replace_file
from kedge_base.run_folder.record_format import parsed_row


def add_incident(folder: Path, incident: Mapping[str, Any]) -> None:
    """Append a row and flush it to disk, because the run may end right after. The first incident creates the file.

    NaN and infinity are written as the strings `nan`, `inf` and `-inf`: they are the point of the row.
    """
    with closing(JsonLines(folder / INCIDENTS_FILE)) as lines:
        lines.write(plain_json(incident, str))


def truncate_incidents(folder: Path, last_update: int) -> None:
    """Remove damaged lines, and incidents of later updates, which a run resumed after `last_update` repeats.

    Incidents that stopped the run are kept, since they explain the stop.

    Raises:
        OutputError: The file cannot be written.
    """
    path = folder / INCIDENTS_FILE
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    rows = [(line, parsed_row(line, numbered=True)) for line in lines]
    kept = [
        line + b"\n" for line, row in rows if row and (row.get("consequence") == "stop" or row["update"] <= last_update)
    ]
    if len(kept) < len(lines) - 1:
        replace_file(path, kept)


def describe_row(evidence: Rollout | Experience, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """One response of an update with all values known per token; `foreign` and `turns` as in a `Sample`.

    Args:
        evidence: The update's rollout, or its experience if there is one already.
        row: Index of the response.
        tokenizer: The policy's tokenizer.
    """
    rollout = evidence if isinstance(evidence, Rollout) else evidence.rollout
    mask = rollout.action_mask[row]
    sides = sides_of(rollout, row, tokenizer)
    values: dict[str, Tensor | None] = {"sampler_logprobs": rollout.logprobs}
    if isinstance(evidence, Experience):
        names = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
        values |= {name: getattr(evidence, name) for name in names}
    return {
        "prompt": str(tokenizer.decode(rollout.prompt_ids[row][rollout.prompt_mask[row]])),
        "response": str(tokenizer.decode(sides.ids)),
        "tokens": sides.tokens,
        **{name: each for name in ("foreign", "turns") if (each := getattr(sides, name))},
        **({"score": float(evidence.total_scores[row])} if isinstance(evidence, Experience) else {}),
        **{name: value[row][mask].tolist() for name, value in values.items() if value is not None},
    }
