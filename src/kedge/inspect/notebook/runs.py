"""What a run's folder shows of the run: key figures, curves and samples by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.inspect.notebook.shown import Sample, Shown
from kedge.inspect.record import RunRecord, read_run
from kedge.inspect.report import REPORT_FILE
from kedge.logs.progress import format_figure

__all__ = ["shown_chain", "shown_run"]

MOST_SAMPLES = 3
CURVES = {
    "sft": {"loss": "loss", "held-out loss": "eval/loss"},
    "reward": {"loss": "loss", "accuracy": "accuracy"},
    "critic": {"loss": "loss", "explained variance": "explained_variance"},
    "ppo": {"score": "reward/score_mean", "KL to the reference": "objective/kl", "tokens": "response/length"},
}


def shown_run(kind: str, folder: Path, following: str = "") -> Shown:
    """A run's key figures, curves and samples, read from its folder.

    Args:
        kind: Name of the result's class.
        folder: The run's folder; of one that is gone or damaged, only its name is shown.
        following: The call that usually comes next; empty if there is none.
    """
    try:
        record = read_run(folder)
    except DataError as error:
        return Shown(kind, str(folder), {"unreadable": str(error)})
    names = CURVES.get(record.stage, {})
    return Shown(
        kind,
        str(folder),
        dict(FIGURES.get(record.stage, _no_figures)(record)),
        {name: str(path) for name, path in _paths(folder) if path.exists()},
        following,
        {label: values for label, name in names.items() if len(values := record.series(name)[1]) > 1},
        list(_samples(record))[:MOST_SAMPLES],
    )


def shown_chain(kind: str, folder: Path, summary: Mapping[str, Any], last: Path, following: str = "") -> Shown:
    """A chain's rounds, and the curves and samples of its last stage.

    Args:
        kind: Name of the result's class.
        folder: The chain's folder.
        summary: Its `summary.json`.
        last: Folder of its last PPO run.
        following: The call that usually comes next.
    """
    figures = {}
    for number, each in enumerate(summary.get("rounds", ()), start=1):
        accuracy, ppo = each["reward_model"].get("accuracy"), each["ppo"]
        agreement = f"reward model {_shown(accuracy)}, " if accuracy else ""
        score = f"score {format_figure(ppo['score_first'])} to {format_figure(ppo['score_last'])}"
        figures[f"round {number}"] = f"{agreement}{score}, KL {format_figure(ppo['kl'])}"
    paths = {name: str(path) for name, path in _paths(folder) if path.exists()}
    return replace(shown_run(kind, last, following), place=str(folder), figures=figures, paths=paths)


def _paths(folder: Path) -> Iterator[tuple[str, Path]]:
    yield "model", folder / "model"
    yield "report", folder / REPORT_FILE


def _no_figures(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield from ()


def _sft(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "steps", f"{len(record.metrics):,}"
    yield from _changes(record, {"loss": "loss", "held-out loss": "eval/loss"})


def _reward(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "steps", f"{len(record.metrics):,}"
    accuracy, by_length = record.summary.get("accuracy"), record.summary.get("length_accuracy")
    yield "held-out accuracy", _shown(accuracy) if accuracy else "unknown (nothing held out)"
    if isinstance(by_length, Mapping):
        yield "by length alone", _shown(by_length)


def _critic(record: RunRecord) -> Iterator[tuple[str, str]]:
    summary = record.summary
    yield "steps", f"{len(record.metrics):,}"
    if explained := summary.get("explained_variance"):
        yield f"explained variance, {summary['measured_on']}", _shown(explained)
        yield "responses", f"{summary['num_responses']:,}"


def _ppo(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "updates", f"{len(record.metrics):,}"
    yield from _changes(record, {"score": "reward/score_mean"})
    for label, name in {"KL": "objective/kl", "tokens": "response/length"}.items():
        if values := record.series(name)[1]:
            yield label, format_figure(values[-1])


def _generate(record: RunRecord) -> Iterator[tuple[str, str]]:
    summary = record.summary
    yield "responses", f"{len(record.results):,}"
    if summary.get("score"):
        yield "score", _shown(summary["score"])
    if summary:
        yield "tokens", format_figure(summary["length"])
        yield "stopped", f"{summary['eos_rate']:.0%}"


def _evaluate(record: RunRecord) -> Iterator[tuple[str, str]]:
    summary = record.summary
    if not summary:
        return
    if "win_rate" not in summary:  # the check of a critic
        yield "critic", str(summary["critic"])
        for label, name in {"pairs, different prompts": "pairs_across", "pairs, same prompt": "pairs_within"}.items():
            if summary.get(name):
                yield label, _shown(summary[name])
        return
    yield "win rate", f"{_shown(summary['win_rate'])} over {summary['against']}"
    yield "won / tied / lost", " / ".join(str(summary[name]) for name in ("won", "tied", "lost"))
    yield "judge", str(summary["judge"])


FIGURES: Mapping[str, Callable[[RunRecord], Iterator[tuple[str, str]]]] = {
    "sft": _sft, "reward": _reward, "critic": _critic, "ppo": _ppo, "generate": _generate, "evaluate": _evaluate,
}  # fmt: skip


def _changes(record: RunRecord, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for label, name in names.items():
        values = record.series(name)[1]
        if values:
            first = f"{format_figure(values[0])} to " if len(values) > 1 else ""
            yield label, f"{first}{format_figure(values[-1])}"


def _samples(record: RunRecord) -> Iterator[Sample]:
    if record.stage == "evaluate":
        for winner, label in {"model": "won", "against": "lost", "tie": "tied"}.items():
            row = next((row for row in record.results if row.get("winner") == winner), None)
            if row is not None:
                texts = {f"model ({label})": row["completion"], "against": row["completion_against"]}
                yield Sample(str(row["prompt"]), texts)
    for row in record.results if record.stage == "generate" else ():
        yield Sample(str(row["prompt"]), {_scored(row): str(row["completion"])})
    newest = [row for row in record.samples if row.get("update") == record.samples[-1].get("update")]
    for row in newest:
        yield Sample(str(row.get("prompt", "")), {_scored(row): str(row.get("response", ""))})


def _scored(row: Mapping[str, Any]) -> str:
    score = row.get("score")
    return f"response, score {format_figure(score)}" if isinstance(score, (int, float)) else "response"


def _shown(interval: Any) -> str:
    if not isinstance(interval, Mapping):
        return format_figure(interval)
    limits = "" if interval["low"] is None else f" ({interval['low']:.2f} to {interval['high']:.2f})"
    return f"{interval['value']:.2f}{limits}"
