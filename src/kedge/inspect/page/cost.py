"""What a run took: seconds and FLOPs by phase, in steps of plain fine-tuning, and memory by role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.page.numbers import as_figure, mean_of, rounded
from kedge.inspect.record import RunRecord

__all__ = ["cost"]

PHASES = ("rollout", "reward", "experience", "train")
GIB = 2**30


def cost(record: RunRecord) -> dict[str, Any]:
    """Seconds and FLOPs of each phase, the whole in SFT steps, the models' sizes and the largest memory.

    Returns:
        `phases` with `seconds` and `flops` over the whole run; `seconds`, of all updates; `sft_steps`, an update's
        mean; `roles`; `peak`, GiB by place.
    """
    figures = {name: _figures(record, name) for row in record.metrics[:1] for name in row}
    figures |= {name: _figures(record, name) for row in record.metrics[-1:] for name in row}
    if not any(figures.get("time/update", ())):
        return {"empty": "No time was measured yet: the first update brings it."}
    phases = [
        {"phase": phase, "seconds": sum(seconds), "flops": sum(figures.get(f"flops/{phase}", ())) or None}
        for phase in PHASES
        if (seconds := figures.get(f"time/{phase}"))
    ]
    total = sum(figures["time/update"])
    rest = total - sum(phase["seconds"] for phase in phases)
    if phases and rest > 0.005 * total:
        phases.append({"phase": "other", "seconds": rest, "flops": None})
    steps = figures.get("cost/sft_steps")
    return {
        "phases": rounded(phases),
        "seconds": rounded(total),
        "updates": len(figures["time/update"]),
        "sft_steps": rounded(mean_of(steps)) if steps else None,
        "roles": [_role(name, role) for name, role in record.roles.items() if isinstance(role, Mapping)],
        "peak": {
            place: rounded(max(found)) for place in ("process", "device") if (found := figures.get(f"memory/{place}"))
        },
    }


def _figures(record: RunRecord, name: str) -> list[float]:
    return [figure for row in record.metrics if (figure := as_figure(row.get(name))) is not None]


def _role(name: str, role: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {part: as_figure(role.get(f"{part}_bytes")) for part in ("weights", "optimizer")}
    return {
        "role": name,
        "parameters": role.get("parameters"),
        "trained": bool(role.get("trained")),
        **{part: None if size is None else rounded(size / GIB) for part, size in sizes.items()},
    }
