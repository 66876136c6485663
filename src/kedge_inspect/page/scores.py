"""The reward model and its scores before and after PPO, and the cost of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from kedge_inspect.page.clipping import NO_DETAILS
from kedge_inspect.page.looks import has_part
from kedge_inspect.page.numbers import as_number, distributions, histogram, numbers_of, rounded
from kedge_inspect.record import RunRecord


def reward_model(record: RunRecord) -> dict[str, Any]:
    """Accuracy next to that of a length baseline, calibration, and the scores of chosen and rejected responses.

    The scores are normalized, as PPO uses them.
    """
    summary = record.summary
    if not has_part(record, "reward_model"):
        return {"empty": ""}
    if "accuracy" not in summary:
        return {"empty": "No comparisons were held out: set data.eval_fraction above 0."}
    return {
        "accuracy": rounded(summary["accuracy"]),
        "length_accuracy": rounded(summary.get("length_accuracy")),
        "num_pairs": summary.get("num_pairs"),
        "error": rounded(summary.get("calibration_error")),
        "bins": rounded(summary.get("calibration_bins") or []),
        "scores": _distributions(
            {name: _normalized(summary.get(f"{name}_scores"), summary) for name in ("chosen", "rejected")}
        ),
    }


def policy_scores(record: RunRecord) -> dict[str, Any]:
    """The scores of the policy's responses in the first and the last update."""
    rows = [row for row in record.details if _is_distribution(row.get("scores"))]
    if not has_part(record, "policy_scores"):
        return {"empty": ""}
    if not rows:
        return {"empty": NO_DETAILS}
    ends = {row["update"]: row["scores"] for row in (rows[0], rows[-1])}
    return {"scores": _distributions({f"update {update}": scores for update, scores in ends.items()})}


def _is_distribution(quantiles: Any) -> bool:
    return isinstance(quantiles, Sequence) and len(quantiles) > 1 and all(as_number(q) is not None for q in quantiles)


def _normalized(quantiles: Any, summary: Mapping[str, Any]) -> list[float] | None:
    if not _is_distribution(quantiles):
        return None
    scale = summary.get("normalization") or {}
    mean = as_number(scale.get("mean")) or 0.0
    std = as_number(scale.get("std")) or 1.0
    return [(score - mean) / std for score in quantiles]


_distributions = partial(distributions, in_bins=histogram, num_bins=32)


PHASES = ("waiting_for_rollout", "rollout", "reward", "experience", "train")
SAMPLING = ("rollout", "reward")
"""The phases that `rollout.max_staleness` moves to the background, so that only waiting for them costs time."""
GIB = 2**30


def cost(record: RunRecord) -> dict[str, Any]:
    """Seconds and FLOPs of each phase, cost in SFT steps, sizes of the models, and peak memory.

    Returns:
        `phases` with `seconds` and `flops` over the whole run; `background`, those of them whose seconds do not
        count in the updates'; `seconds` of all updates; `sft_steps`, mean per update; `roles`; `peak`, GiB by
        `process` and `device`.
    """
    names = dict.fromkeys(name for row in [*record.metrics[:1], *record.metrics[-1:]] for name in row)
    values = {name: numbers_of(record.metrics, name) for name in names}
    if not any(values.get("time/update", ())):
        return {"empty": "No times yet: they come with the first update."}
    phases = [
        {"phase": phase, "seconds": sum(seconds), "flops": sum(values.get(f"flops/{phase}", ())) or None}
        for phase in PHASES
        if (seconds := values.get(f"time/{phase}"))
    ]
    background = SAMPLING if "time/waiting_for_rollout" in values else ()
    total = sum(values["time/update"])
    rest = total - sum(phase["seconds"] for phase in phases if phase["phase"] not in background)
    if phases and rest > 0.005 * total:
        phases.append({"phase": "other", "seconds": rest, "flops": None})
    steps = values.get("cost/sft_steps")
    return {
        "phases": rounded(phases),
        "background": list(background),
        "seconds": rounded(total),
        "updates": len(values["time/update"]),
        "sft_steps": rounded(fmean(steps)) if steps else None,
        "roles": [_role(name, role) for name, role in record.roles.items() if isinstance(role, Mapping)],
        "peak": {
            place: rounded(max(found)) for place in ("process", "device") if (found := values.get(f"memory/{place}"))
        },
    }


def _role(name: str, role: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {part: as_number(role.get(f"{part}_bytes")) for part in ("weights", "optimizer")}
    return {
        "role": name,
        "parameters": role.get("parameters"),
        "trained": bool(role.get("trained")),
        **{part: None if size is None else rounded(size / GIB) for part, size in sizes.items()},
    }
