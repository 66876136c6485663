"""Handwritten evaluations and generate runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kedge_inspect.record import RunRecord

SUMMARY: dict[str, Any] = {
    "model": "runs/ppo/model",
    "against": "runs/sft/model",
    "judge": "letters",
    "judge_mode": "score",
    "num_prompts": 5,
    "num_judged": 4,
    "num_equal": 1,
    "num_unequal_lengths": 2,
    "win_rate": {"value": 0.625, "low": 0.25, "high": 1.0},
    "won": 2,
    "tied": 1,
    "lost": 1,
    "score": {"value": 2.0, "low": 1.0, "high": 3.0},
    "score_against": {"value": 1.0, "low": 0.5, "high": 1.5},
    "kl": {"value": 4.0, "low": 3.0, "high": 5.0},
    "length": 2.0,
    "length_against": 3.0,
    "eos_rate": 1.0,
    "eos_rate_against": 0.5,
    "longer_wins": None,
    "position_bias": None,
    "frontier": [],
}
WINNERS = ["model", "model", "tie", "against", None]


def judgment(number: int, winner: str | None, **more: Any) -> dict[str, Any]:
    ours, theirs = f"ours {number}", "the same" if winner == "tie" else f"theirs {number}"
    return {
        "prompt": f"Deck {number}:",
        "completion": "the same" if winner == "tie" else ours,
        "completion_against": theirs,
        "winner": winner,
        "length": 2,
        "length_against": 2 + number % 2,
        "score": float(number),
        "score_against": 1.0,
        **more,
    }


def evaluation_record(rows: list[dict[str, Any]] | None = None, **summary: Any) -> RunRecord:
    """Two won, one tied, one lost, one undecided."""
    judged = [judgment(number, winner) for number, winner in enumerate(WINNERS)]
    return RunRecord(
        Path("runs/evaluate"),
        facts={"stage": "evaluate", "device": "cpu"},
        results=judged if rows is None else rows,
        summary={**SUMMARY, **summary},
    )


def generation_record(**parts: Any) -> RunRecord:
    """Three responses, one of them without a score."""
    scores = [1.0, None, 3.0]
    rows = [
        {"prompt": f"Deck {number}:", "completion": "ay" * number, "stopped": number > 0, "score": score}
        for number, score in enumerate(scores)
    ]
    summary = {"model": "runs/ppo/model", "num_prompts": 3, "num_responses": 3, "num_distinct": 3, "num_scored": 2,
               "length": 4.0, "eos_rate": 2 / 3, "reward": "letters",
               "score": {"value": 2.0, "low": 1.0, "high": 3.0}}  # fmt: skip
    known: dict[str, Any] = {"facts": {"stage": "generate"}, "results": rows, "summary": summary}
    return RunRecord(Path("runs/generate"), **{**known, **parts})


def solving_record(**parts: Any) -> RunRecord:
    """Two responses to each of two prompts, by two policies."""
    rows = [
        {"model": model, "prompt": f"Deck {row // 2}:", "completion": f"#### {row}", "stopped": True, "length": 3,
         "score": float(row == 0), "reason": "right" if row == 0 else "wrong value", "answer": str(row)}
        for model in ("runs/ppo/model", "runs/sft/model")
        for row in range(4)
    ]  # fmt: skip
    half = {"value": 0.5, "low": 0.25, "high": 0.75}
    figures = {"pass@k": {"1": {**half, "value": 0.25}, "2": half}, "length": 3.0, "eos_rate": 1.0, "score": half}
    other = {"model": "runs/sft/model", **figures, "difference": {"pass@k": {}}}
    summary = {"model": "runs/ppo/model", **figures, "maj@k": {"1": half, "2": half}, "judge": "gsm8k",
               "temperature": 0.7, "num_prompts": 2, "num_samples": 2, "num_responses": 4, "num_scored": 4,
               "others": [other]}  # fmt: skip
    known: dict[str, Any] = {
        "facts": {"stage": "evaluate", "device": "cpu"},
        "config": {"generate": {"num_responses": 2}},
        "results": rows,
        "summary": summary,
    }
    return RunRecord(Path("runs/evaluate"), **{**known, **parts})


def write_judged(folder: Path, record: RunRecord, *, finished: bool = True) -> Path:
    """A record as the files of a run."""
    folder.mkdir(parents=True)
    header = "".join(f"# {name}: {value}\n" for name, value in record.facts.items())
    (folder / "config.yaml").write_text(f"{header}\n{{}}\n", encoding="utf-8")
    results = "judgments.jsonl" if record.stage == "evaluate" else "responses.jsonl"
    for name, rows in ((results, record.results), ("progress.jsonl", record.progress)):
        if rows:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if finished:
        (folder / "summary.json").write_text(json.dumps(record.summary), encoding="utf-8")
        (folder / "finished.json").write_text(json.dumps({"stage": record.stage}), encoding="utf-8")
    return folder
