"""Handwritten runs of a few updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kedge_inspect.record import RunRecord

TOKENS = [" The", " boat", ".", "<eos>"]
CONFIG: dict[str, Any] = {
    "reward": [{"source": "model", "weight": 1.0}, {"source": "judge.py:gold", "weight": 0.0, "name": "gold"}],
    "rollout": {"num_prompts": 4, "num_responses": 2},
    "ppo": {"clip_range": 0.2, "clip_range_high": None, "policy_loss": "clipped", "num_updates": 5},
    "runtime": {"num_samples": 2},
}


def metric_row(update: int, **more: Any) -> dict[str, Any]:
    """An update whose score is its number, and whose KL is its square."""
    return {
        "update": update,
        "reward/score_mean": float(update),
        "reward/score_std": 0.5,
        "objective/kl": float(update**2),
        "policy/entropy": 2.0 / update,
        "policy/ratio_max": 1.0 + update,
        "response/length": 10.0,
        "response/eos_rate": 0.75,
        "score/model": float(update),
        "score/gold": -abs(update - 3.0),
        "time/rollout": 2.0,
        "time/train": 1.0,
        "time/update": 4.0,
        "flops/rollout": 10.0,
        "flops/train": 30.0,
        "cost/sft_steps": 4.0 + update,
        "memory/process": 0.5 * update,
        **more,
    }


def epoch(raised: list[int], lowered: list[int], clip_fraction: float, cases: dict[str, float]) -> dict[str, Any]:
    return {
        "clip_fraction": clip_fraction,
        "approx_kl": 0.01,
        "cases": {"raised": 0.0, "raised_held": 0.0, "lowered": 0.0, "lowered_held": 0.0} | cases,
        "ratios": {"raised": raised, "lowered": lowered},
    }


def sample(update: int, fixed: int | None = None, tokens: list[str] | None = None, **more: Any) -> dict[str, Any]:
    tokens = TOKENS if tokens is None else tokens
    figures = [0.1 * place for place in range(len(tokens))]
    return {
        "update": update,
        "prompt": "Tell me.",
        "response": "".join(tokens),
        "tokens": tokens,
        "score": 1.5,
        "stopped": True,
        "logprobs": [-figure - 0.1 for figure in figures],
        "ref_logprobs": [-figure - 0.2 for figure in figures],
        "values": [4.2, 4.5, 4.8, 5.0][: len(tokens)] + [5.0] * (len(tokens) - 4),
        "rewards": [0.0] * (len(tokens) - 1) + [6.0],
        "advantages": [figure - 0.15 for figure in figures],
        "entropies": [1.0] * len(tokens),
        "new_logprobs": [-figure for figure in figures],
        "fixed": fixed,
        **more,
    }


def ppo_record(**parts: Any) -> RunRecord:
    """Five updates, two of them in detail, two fixed prompts."""
    quantiles = [float(place) for place in range(21)]
    details = [
        {"update": update, "scores": [q + update for q in quantiles], "epochs": [middle_epoch(), middle_epoch()]}
        for update in (1, 5)
    ]
    known: dict[str, Any] = {
        "facts": {"stage": "ppo", "device": "cpu"},
        "config": CONFIG,
        "metrics": [metric_row(update) for update in range(1, 6)],
        "details": details,
        "samples": [sample(0, 0), sample(0, 1), sample(1), sample(5, 0), sample(5, 1), sample(5)],
        "roles": {"policy": {"parameters": 10, "weights_bytes": 2**30, "optimizer_bytes": 2**31, "trained": True}},
    }
    return RunRecord(Path("runs/story"), **{**known, **parts})


def middle_epoch() -> dict[str, Any]:
    """All ratios in the middle bin, three raised tokens for each lowered one."""
    raised, lowered = [0] * 41, [0] * 41
    raised[20], lowered[20] = 3, 1
    return epoch(raised, lowered, 0.0, {"raised": 0.75, "lowered": 0.25})


def reward_record(**summary: Any) -> RunRecord:
    known = {
        "accuracy": {"value": 0.75, "low": 0.7, "high": 0.8},
        "length_accuracy": {"value": 0.6, "low": 0.5, "high": 0.7},
        "num_pairs": 40,
        "calibration_error": 0.05,
        "calibration_bins": [{"confidence": 0.6, "accuracy": 0.7, "num_pairs": 40}],
        "normalization": {"mean": 1.0, "std": 2.0},
        "chosen_scores": [1.0 + place for place in range(21)],
        "rejected_scores": [float(-place) for place in range(20, -1, -1)],
    }
    metrics = [{"update": step, "loss": 0.7 - 0.1 * step, "accuracy": 0.5, "time/update": 1.0} for step in (1, 2, 3)]
    return RunRecord(
        Path("runs/reward"),
        facts={"stage": "reward"},
        config={"reward_model": {"batch_size": 8}},
        metrics=metrics,
        summary={**known, **summary},
    )


def write_run(folder: Path, record: RunRecord, *, finished: bool = True) -> Path:
    """A record as the files of a run."""
    folder.mkdir(parents=True)
    header = "".join(f"# {name}: {value}\n" for name, value in record.facts.items())
    (folder / "config.yaml").write_text(f"{header}\n{json.dumps(record.config)}\n", encoding="utf-8")
    for name in ("metrics", "details", "samples"):
        lines = [json.dumps(row) + "\n" for row in getattr(record, name)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    if record.roles:
        (folder / "roles.json").write_text(json.dumps(record.roles), encoding="utf-8")
    if record.summary:
        (folder / "summary.json").write_text(json.dumps(record.summary), encoding="utf-8")
    if finished:
        (folder / "finished.json").write_text('{"stage": "any"}', encoding="utf-8")
    return folder


def critic_check(update: int, gain: float) -> dict[str, object]:
    """A row of `critic_checks.jsonl`, some of whose figures could not be determined."""
    half = {"value": 0.5, "low": 0.25, "high": 0.75}
    prefixes = [{"value": float(at), "returns": 2.0 * at} for at in range(1000)]
    return {
        "update": update, "num_prompts": 32, "num_prefixes": 1000, "num_continuations": 8.0, "pairs_across": half,
        "prompt_pairs_across": half, "ceiling_across": 0.875, "pairs_within": None, "ceiling_within": None,
        "gain": {"value": gain, "low": gain - 0.1, "high": gain + 0.1}, "prefixes": prefixes,
        "bins": [{"value": 1.0, "returns": half, "count": 100}],
    }  # fmt: skip
