"""Random valid settings: a run is refused in one line, or trains, and is the same after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

import kedge
from kedge.config.explain.describe import all_fields
from kedge.config.presets import FAMILY
from kedge.training.checkpoint.store import save_checkpoint
from kedge_base.errors import KedgeError
from kedge_base.run_folder.record_format import MEASURED
from tests.config.test_refusing_pairs import FURTHER, values_of
from tests.fuzz.outcome import case_counts, check_line, fuzz
from tests.tiny import save_tiny_policy

TEXTS = [f"The {one} and the {other}" for one in ("boat", "tide", "crew", "sail") for other in ("rope", "wind", "deck")]
DATA: dict[str, dict[str, Any]] = {
    "sft": {"demonstrations": [{"prompt": text, "completion": f" {text[4:8]} sails"} for text in TEXTS]},
    "reward": {"comparisons": [{"prompt": text, "chosen": f" {text[4:8]}", "rejected": " sinks"} for text in TEXTS]},
    "critic": {"prompts": TEXTS},
    "ppo": {"prompts": TEXTS},
}
SECTIONS = {
    "sft": ("sft.", "data.", "adapter.", "optimization.", "runtime.", "checkpoint."),
    "reward": ("reward_model.", "data.", "adapter.", "optimization.", "runtime.", "checkpoint."),
    "critic": ("critic.", "ppo.", "rollout.", "data.", "optimization.", "runtime.", "checkpoint."),
    "ppo": ("ppo.", "rollout.", "data.", "adapter.", "optimization.", "runtime.", "checkpoint."),
}
# What needs another machine, package, server or file, and what decides how long a run takes.
FIXED = {
    *("runtime.device", "runtime.parallel", "runtime.loggers", "runtime.report", "runtime.seed", "runtime.num_threads"),
    *("rollout.engine", "rollout.max_new_tokens", "rollout.num_prompts", "ppo.num_updates", "checkpoint.every"),
    *("data.demonstrations", "data.comparisons", "data.prompts", "data.eval_prompts", "data.pretraining", "data.mix"),
    *("data.columns", "data.template", "data.chat_template", "data.max_length", "data.max_prompt_tokens"),
    *("ppo.reference", "ppo.critic_init", "adapter.target_modules", "adapter.modules_to_save"),
}
LARGEST = 20
LONGER = ("vapo", "sao", "distill")
"""Presets that need more updates, or a teacher."""

PRESETS = {"s2-defaults": (), **{each.name: each.values for each in FAMILY if each.name not in LONGER}}


def scored(completions: list[str], **_: object) -> list[float]:
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def is_small(value: object) -> bool:
    numbers = [each for each in json.loads(json.dumps([value], default=str)) if isinstance(each, (int, float))]
    return all(each <= LARGEST for each in numbers) and "some.py" not in str(value)


FIELDS = {
    name: values
    for name, field in all_fields()
    if name not in FIXED
    and not name.endswith("learning_rate")
    and (
        values := [
            each for each in [*values_of(field.annotation, field.metadata), *FURTHER.get(name, ())] if is_small(each)
        ]
    )
}


@st.composite
def settings(draw: st.DrawFn) -> tuple[str, dict[str, Any], int]:
    """A stage, a few of its settings, and after which of its steps it is interrupted."""
    stage = draw(st.sampled_from(sorted(DATA)))
    names = sorted(name for name in FIELDS if name.startswith(SECTIONS[stage]))
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=5, unique=True))
    found: dict[str, Any] = {name: draw(st.sampled_from(FIELDS[name])) for name in chosen}
    if stage == "ppo" and draw(st.booleans()):
        found["preset"] = draw(st.sampled_from([*PRESETS]))
        found |= {"rollout.num_responses": 2} if "rollout.num_responses" in PRESETS[found["preset"]] else {}
    return stage, found, draw(st.integers(1, 3))


def outcome(stage: str, policy: Path, out: Path, found: dict[str, Any], **more: Any) -> str:
    """Run a stage; the line with which it is refused, or nothing."""
    small = {"data.max_prompt_tokens": 32, "checkpoint.every": 1, "report": False, "runtime.num_threads": 1}
    if stage in ("ppo", "critic"):
        small |= {"reward": scored, "rollout.max_new_tokens": 5, "rollout.num_prompts": 4}
    if stage == "ppo":
        small["ppo.num_updates"] = 4
    try:
        getattr(kedge, stage)(model=policy, out=out, **DATA[stage], **{**small, **found}, **more)
    except KedgeError as error:
        return str(error)
    return ""


def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The metrics without times, and the weights of the model."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    weights = {file.name: file.read_bytes() for file in (folder / "model").rglob("*.safetensors")}
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows], weights


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Interrupt a run as Ctrl-C does, when it has saved so many checkpoints."""
    left = iter(range(after - 1))

    def saved(*arguments: Any, **options: Any) -> Path:
        folder = save_checkpoint(*arguments, **options)
        if next(left, None) is None:
            raise KeyboardInterrupt
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kedge.training.checkpoint.state.save_checkpoint", saved)
        yield


@case_counts(6, 300)
def test_a_run_is_refused_in_one_line_or_is_the_same_after_an_interruption(
    num_cases: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    policy = save_tiny_policy(tmp_path / "policy")

    def check(case: tuple[str, dict[str, Any], int]) -> None:
        stage, found, after = case
        whole, other = tmp_path / "whole", tmp_path / "other"
        for folder in (whole, other):
            shutil.rmtree(folder, ignore_errors=True)
        if line := outcome(stage, policy, whole, found):
            check_line(line)
            # A run that the guard stops keeps its model.
            assert (whole / "metrics.jsonl").exists() or not (whole / "model").exists()
            return
        with suppress(KeyboardInterrupt), interrupted(after):
            outcome(stage, policy, other, found)
        assert outcome(stage, policy, other, found, resume=True) == ""
        assert str(left(other)[0]) == str(left(whole)[0])  # in text, NaN equals NaN
        assert left(other)[1] == left(whole)[1]

    fuzz(num_cases, settings(), check, record_property)
