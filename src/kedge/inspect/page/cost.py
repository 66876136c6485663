"""Cost of a run: seconds and FLOPs by phase, equivalent fine-tuning steps, and memory by role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.page.numbers import as_number, mean_of, numbers_of, rounded
from kedge.inspect.record import RunRecord

__all__ = ["cost"]

PHASES = ("rollout", "reward", "experience", "train")
GIB = 2**30


def cost(record: RunRecord) -> dict[str, Any]:
    """Seconds and FLOPs of each phase, cost in SFT steps, sizes of the models, and peak memory.

    Returns:
        `phases` with `seconds` and `flops` over the whole run; `seconds` of all updates; `sft_steps`, mean per update;
        `roles`; `peak`, GiB by `process` and `device`.
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
    total = sum(values["time/update"])
    rest = total - sum(phase["seconds"] for phase in phases)
    if phases and rest > 0.005 * total:
        phases.append({"phase": "other", "seconds": rest, "flops": None})
    steps = values.get("cost/sft_steps")
    return {
        "phases": rounded(phases),
        "seconds": rounded(total),
        "updates": len(values["time/update"]),
        "sft_steps": rounded(mean_of(steps)) if steps else None,
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
