"""Shell completion of FIELD=VALUE: field names, then the values of a choice."""

from __future__ import annotations

import typer

from kedge.config import completions
from kedge.stages.stage import stages

__all__ = ["complete_override"]


def complete_override(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Candidates for an override, each with a description.

    bash splits words at `=`: for `policy_loss=cl` it asks about `cl`, and has `policy_loss` and `=` before it.
    """
    stage = ctx.info_name if ctx.info_name in stages() else None
    before = [word for word in ctx.params.get("overrides") or () if word != "="]
    if before and "=" not in before[-1]:
        candidates = completions(f"{before[-1]}={incomplete.lstrip('=')}", stage)
        return [(text.partition("=")[2], meaning) for text, meaning in candidates]
    return completions(incomplete, stage)
