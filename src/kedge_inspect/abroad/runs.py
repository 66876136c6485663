"""Turns the log of another library into a `RunRecord`: who wrote it, metrics under kedge's names, known settings."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from kedge_base.errors import DataError
from kedge_base.intervals import share_interval
from kedge_base.machine.progress import say
from kedge_base.run_folder.output import is_run
from kedge_base.texts import read_table
from kedge_inspect.abroad.settings import translate_settings
from kedge_inspect.abroad.sources import ARGS, Log, log_files, read_log
from kedge_inspect.abroad.trainers import TRAINERS, Trainer
from kedge_inspect.abroad.wire import Row
from kedge_inspect.record import QUIET_SECONDS, RunRecord, is_own, read_run

METRICS = [[*row, "", ""][:6] for row in read_table(Path(__file__).with_name("metrics.tsv"))]
"""Rows of the table of metrics: trainer, versions, the library's name, kedge's, conversion and condition."""

MAD_TO_STD_OF_STEP = 1.4826 / math.sqrt(2)
"""Standard deviation of a normal variable, relative to the median distance of two values."""

OFTEN = 0.1
"""Share of NaN gradient norms that a loss scale, which skips single steps in fp16, does not explain."""

SMALLEST_KL = 1e-3
"""KL below which the quotient of its cost and itself says nothing about β."""

MOST_REWARDS = 6
MOST_PAIRS = 1_000_000
FEWEST = 3
"""Means of scores from which their noise is computed."""


@dataclass(frozen=True)
class Origin:
    """The user's description of a log.

    Attributes:
        library: What wrote it, if its content does not say: a trainer's key, or its beginning.
        settings: A YAML or JSON file with its settings, under the library's names.
    """

    library: str = ""
    settings: Path | None = None


HERE = Origin()


def read_any_run(
    path: str | os.PathLike[str],
    *,
    origin: Origin = HERE,
    on_skipped: Callable[[str], None] = say,
) -> RunRecord:
    """Read a run of kedge, or the log of another library.

    Args:
        path: kedge's folder or a file in it, or another library's file or folder.
        origin: What the user knows about another library's log.
        on_skipped: As for `read_run`.

    Raises:
        DataError: The run is missing or damaged, or its origin is unclear.
    """
    path = Path(path).expanduser()
    folder = path.parent if path.is_file() else path
    if is_own(folder) or (is_run(folder) and not log_files(path)):
        return read_run(folder, on_skipped=on_skipped)
    trainer, log = recognize(read_log(path, origin.settings), origin.library)
    saved = log.files[0].with_name(ARGS)
    if saved.is_file() and not log.settings:
        on_skipped(f"{saved}: the settings in it cannot be read, left out")
    return _record(path, trainer, log)


def recognize(log: Log, library: str = "") -> tuple[Trainer, Log]:
    """Find the trainer that wrote a log; also return the log, without TensorBoard's prefixes if it has them.

    Args:
        log: The log.
        library: A trainer's key or the beginning of one, if the user knows.

    Raises:
        DataError: The trainer cannot be determined, or is not supported.
    """
    allowed = [each for each in TRAINERS if not library or each.key == library or each.key.startswith(f"{library}-")]
    if not allowed:
        raise DataError(f"no library {library!r}; choose one of {', '.join(trainer.key for trainer in TRAINERS)}")
    for candidate in (log, _without_prefixes(log)):
        names = _names(candidate)
        named = [each for each in allowed if each.setting in log.settings or each.name == log.trainer]
        said = named or (allowed if len(allowed) == 1 else [])
        found = [each for each in said if any(row[0] == each.key and row[2] in names for row in METRICS)] or [
            each for each in allowed if any(group <= names for group in each.marks)
        ]
        if found:
            return found[0], candidate
    raise DataError(
        f"{str(log.files[0])!r}: its names ({', '.join(sorted(_names(log))[:8])}, …) do not say what wrote it; say it "
        f"with --library: {', '.join(trainer.key for trainer in allowed)}"
    )


def _names(log: Log) -> set[str]:
    return {name for row in log.rows for name in row}


def _without_prefixes(log: Log) -> Log:
    """The log with the names that TensorBoard and W&B have from transformers: `train/loss`, `eval/loss`."""

    def short(name: str) -> str:
        return name.removeprefix("train/") if not name.startswith("eval/") else f"eval_{name.removeprefix('eval/')}"

    return replace(log, rows=[{short(name): value for name, value in row.items()} for row in log.rows])


def _record(path: Path, trainer: Trainer, log: Log) -> RunRecord:
    is_ppo = trainer.stage == "ppo"
    judged = _reward_terms(log.rows) if is_ppo else {}
    config = translate_settings(trainer, log.settings, judged)
    rows = [{"update": row["step"], **_translated(trainer, row, log, judged)} for row in log.rows]
    if is_ppo:
        _add_coefficient(rows, config["ppo"].get("kl_coef"))
        _add_spread(rows, log, config["rollout"])
        _add_stops(rows, log)
        if all(row.get("episode/turns", 1) == 1 for row in rows):  # verl also counts those of plain responses
            for row in rows:
                row.pop("episode/turns", None)
        if not any(name.startswith("value/") for row in rows for name in row):
            config["ppo"]["critic"] = "none"
    kept = [row for row in rows if len(row) > 1]
    if not kept:
        raise DataError(f"{str(log.files[0])!r} has none of the metrics of {trainer.title}")
    state, stops_at = _state(log)
    return RunRecord(
        path,
        {"stage": trainer.stage, "library": trainer.title, "log": log.files[0].name},
        config,
        kept,
        incidents=_incidents(log.rows),
        summary=_held_out(log.rows) if trainer.stage == "reward" else {},
        state=state,
        stops_at=stops_at,
        trainer=trainer,
        arguments=log.settings,
    )


def _translated(trainer: Trainer, row: Row, log: Log, judged: Iterable[str]) -> Row:
    """Translate the finite metrics of a row to kedge's names."""
    found: Row = {}
    for key, _, name, metric, how, condition in METRICS:
        if key == trainer.key and metric not in found and _holds(condition, log):
            given = _only(row) if "*" in name else row.get(name)
            value = None if given is None else _converted(given, how, row)
            found |= {} if value is None else {metric: value}
    found |= {f"score/{name}": row[f"rewards/{name}/mean"] for name in judged if f"rewards/{name}/mean" in row}
    if log.settings.get("mask_truncated_completions") and found.get("response/eos_rate") == 0:
        found.pop("policy/entropy", None)  # TRL logs the mean over no tokens as 0
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _converted(value: float, how: str, row: Row) -> float | None:
    if how.startswith("*"):
        other = row.get(how[1:])
        return None if other is None else value * other
    return 1 - value if how == "1-" else value * float(how or 1)


def _holds(condition: str, log: Log) -> bool:
    """True if a condition of the table is known to hold."""
    if condition in ("", "only"):
        return True
    if not log.settings:
        return False
    if condition.startswith("no "):
        return condition[3:] not in log.settings
    name, _, wanted = condition.partition("=")
    return name in log.settings and (not wanted or str(log.settings[name]) == wanted)


def _only(row: Row) -> float | None:
    """The standard deviation of a single reward function's scores, if its mean is that of the reward."""
    parts = [name for name in row if name.startswith("rewards/") and name.endswith("/std")]
    if len(parts) != 1 or not _close(row.get(f"{parts[0].removesuffix('/std')}/mean"), row.get("reward")):
        return None
    return row[parts[0]]


def _close(one: Any, other: Any) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)


def _reward_terms(rows: Sequence[Row]) -> dict[str, float]:
    """The weights of several reward functions, each 1 or 0 for a judge; empty unless exactly one choice adds up."""
    scored = [row for row in rows if row.get("reward") is not None]
    names = sorted(
        name[len("rewards/") : -len("/mean")]
        for name in (scored[0] if scored else ())
        if name.startswith("rewards/") and name.endswith("/mean")
    )
    if not 1 < len(names) <= MOST_REWARDS:
        return {}
    choices = [
        chosen
        for count in range(1, len(names) + 1)
        for chosen in itertools.combinations(names, count)
        if all(_close(sum(row.get(f"rewards/{name}/mean") or 0 for name in chosen), row["reward"]) for row in scored)
    ]
    return {name: float(name in choices[0]) for name in names} if len(choices) == 1 else {}


def _add_coefficient(rows: Sequence[Row], beta: float | None) -> None:
    """Add β, from the settings or as the quotient of the KL's cost and the KL."""
    for row in rows:
        kl = row.get("objective/kl")
        cost = row.get("reward/kl")
        known = beta if kl is None or cost is None or abs(kl) <= SMALLEST_KL else cost / kl
        if kl is not None and known is not None:
            row.setdefault("objective/kl_coef", known)


def _add_spread(rows: Sequence[Row], log: Log, sizes: dict[str, Any]) -> None:
    """Add the number of responses in an update of TRL's PPO, and where each has its own prompt the spread of scores.

    The mean of n independent scores varies from update to update by their standard deviation over √n.
    """
    counts = [row["episode"] / row["step"] for row in log.rows if row.get("episode") and row["step"]]
    if counts:
        sizes |= {"num_prompts": int(median(counts)), "num_responses": 1}
    scored = [row for row in rows if "reward/score_mean" in row]
    if sizes.get("num_responses") != 1 or not sizes.get("num_prompts") or len(scored) < FEWEST:
        return
    moves = (abs(b["reward/score_mean"] - a["reward/score_mean"]) for a, b in itertools.pairwise(scored))
    spread = MAD_TO_STD_OF_STEP * median(moves) * math.sqrt(sizes["num_prompts"])
    for row in scored:
        row.setdefault("reward/score_std", spread)


def _add_stops(rows: Sequence[Row], log: Log) -> None:
    """Add the share of responses that stop in TRL's PPO, which counts stop tokens in those of one process.

    A response that continues after its first stop token has several, so only a count of 0 is certain.
    """
    counts = [row.get("val/num_eos_tokens") for row in log.rows]
    most = max((count for count in counts if count is not None), default=None)
    size = log.settings.get("local_batch_size") if log.settings.get("stop_token") == "eos" else None
    if most is None or (most and (not size or most > size)):
        return
    for row, count in zip(rows, counts, strict=True):
        if count is not None:
            row |= {"response/eos_rate": count / (size or 1)}


LOSSES = ("loss", "policy_loss", "actor/pg_loss", "loss/policy_avg", "train/loss", "gpt_loss")
NORMS = ("grad_norm", "actor/grad_norm", "actor_grad_norm")


def _incidents(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The losses that are NaN or infinite, and such gradient norms if there are many."""
    found = [
        {"kind": "nonfinite", "update": row["step"], "what": f"{name} is not finite", "figures": {name: None}}
        for row in rows
        for name in LOSSES + NORMS
        if row.get(name) is not None and not math.isfinite(row[name])
    ]
    lost = [each for each in found if each["what"].split()[0] in LOSSES]
    return found if len(found) - len(lost) > OFTEN * len(rows) else lost


def _held_out(rows: Sequence[Row]) -> dict[str, Any]:
    """The last held-out accuracy of a reward model, with an interval if the number of pairs is known."""
    last = next((row for row in reversed(rows) if row.get("eval_accuracy") is not None), {})
    pairs = round((last.get("eval_runtime") or 0) * (last.get("eval_samples_per_second") or 0))
    if not 0 < pairs < MOST_PAIRS:
        return {}
    right = round(last["eval_accuracy"] * pairs)
    interval = share_interval([1.0] * right + [0.0] * (pairs - right))
    return {"accuracy": {**interval.as_json(), "value": last["eval_accuracy"]}, "num_pairs": pairs}


def _state(log: Log) -> tuple[Literal["finished", "running", "stopped"], float | None]:
    """Tell whether the run has finished, is still writing its log, or has stopped."""
    if log.total is not None and log.rows[-1]["step"] >= log.total:
        return "finished", None
    stops_at = max(file.stat().st_mtime for file in log.files) + QUIET_SECONDS
    if time.time() < stops_at:
        return "running", stops_at
    return ("finished" if log.total is None else "stopped"), None
