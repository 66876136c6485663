"""The looks of kedge's own stages, with rows in rows.tsv and charts in panels.tsv."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kedge_base.stage import imported, registered_stages
from kedge_base.texts import read_table
from kedge_inspect.look import Look, Panel, Row
from kedge_inspect.page import sentences
from kedge_inspect.record import RunRecord


def _read_panels(path: Path) -> dict[str, tuple[Panel, ...]]:
    """The charts of a table by stage; `path` explains its columns."""
    panels: dict[str, tuple[Panel, ...]] = {}
    for stages, group, title, unit, options, note, metrics in read_table(path):
        lines = dict(line.split("=") for line in metrics.split("; "))
        given = (option.partition("=") for option in options.split())
        settings = {name: json.loads(value or "true") for name, _, value in given}
        for stage in stages.split():
            panels[stage] = (*panels.get(stage, ()), Panel(group, title, unit, lines, note, **settings))
    return panels


def _read_rows(path: Path, stage: str) -> tuple[Row, ...]:
    """The rows of a stage in a table; `path` explains its columns."""
    return tuple(Row(*cast("list[Any]", row)) for stages, *row in read_table(path) if stage in stages.split())


PANELS = _read_panels(Path(__file__).with_name("panels.tsv"))
ROWS = {stage: _read_rows(Path(__file__).with_name("rows.tsv"), stage) for stage in ("ppo", "critic", "sft")}


def _updates(record: RunRecord) -> int | None:
    total = record.setting("ppo.num_updates")
    return total if isinstance(total, int) else None


OTHER = Look(rows=ROWS["sft"], sentences=sentences.of_fine_tuning)
"""The look of a stage without its own."""

PPO = Look(
    title="PPO",
    unit="update",
    rows=ROWS["ppo"],
    panels=PANELS["ppo"],
    sentences=sentences.of_ppo,
    parts=frozenset({"clipping", "frontier", "held_out", "critic", "samples", "policy_scores"}),
    size=("rollout.num_prompts", "rollout.num_responses"),
    items="responses",
    total=_updates,
    goals=("eval/score", "reward/score_mean", "eval/total", "reward/total"),
)
SFT = replace(OTHER, title="Fine-tuning", panels=PANELS["sft"], size=("sft.batch_size",), goals=("eval/loss", "loss"))
LOOKS = {
    "sft": SFT,
    "reward": replace(
        SFT,
        title="Reward model training",
        panels=PANELS["reward"],
        sentences=sentences.of_reward_model,
        parts=frozenset({"reward_model"}),
        size=("reward_model.batch_size",),
        goals=("eval/accuracy", "accuracy"),
    ),
    "critic": Look(
        title="The training of the critic",
        rows=ROWS["critic"],
        panels=PANELS["critic"],
        sentences=sentences.of_critic,
        size=("critic.batch_size",),
        goals=("eval/explained_variance", "explained_variance"),
    ),
    "ppo": PPO,
    "evaluate": replace(OTHER, title="Evaluation", sentences=sentences.of_evaluation, parts=frozenset({"evaluation"})),
    "generate": replace(OTHER, title="Generation", sentences=sentences.of_generation, parts=frozenset({"generation"})),
}
"""The look of each stage, in the order of a chain."""


def look_of(stage: str) -> Look:
    """Return the look of a stage, which may be kedge's own or registered by another package."""
    if stage in LOOKS:
        return LOOKS[stage]
    registered = next((each for each in registered_stages() if each.name == stage), None)
    if registered is None:
        return OTHER
    look = imported(registered.looks) if registered.looks else OTHER
    return replace(look, title=registered.title, unit=registered.unit)


def has_part(record: RunRecord, part: str) -> bool:
    """True if the runs of a record's stage can fill a section of the page; logs of other libraries cannot."""
    return record.trainer is None and part in look_of(record.stage).parts
