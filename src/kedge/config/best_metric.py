"""Which metric decides which checkpoint is the best, and in which direction."""

from dataclasses import dataclass

from kedge.config.explain.describe import suggestion
from kedge.config.schema.root import Config
from kedge.errors import ConfigError

__all__ = ["BestMetric", "best_metric", "metric_in_chain"]

HIGHER, LOWER = True, False
SUPERVISED = {"eval/loss": LOWER, "loss": LOWER}
BETTER: dict[str, dict[str, bool]] = {
    "ppo": {
        "eval/score": HIGHER,
        "eval/win_rate": HIGHER,
        "reward/score_mean": HIGHER,
        "reward/total": HIGHER,
    },
    "sft": {**SUPERVISED, "eval/token_accuracy": HIGHER, "token_accuracy": HIGHER},
    "critic": {**SUPERVISED, "eval/explained_variance": HIGHER, "explained_variance": HIGHER},
    "reward": {**SUPERVISED, "eval/accuracy": HIGHER, "accuracy": HIGHER},
    "control": {"eval/return_mean": HIGHER, "episode/return_mean": HIGHER},
}
"""By stage: the metrics that can tell a better model from a worse one, and whether higher is better.

No KL and no share of ended responses: the untrained start has the best value of them.
"""

TERMS = ("eval/score/", "score/")
"""Prefixes of the metrics of single reward terms, such as a judge's; higher is better unless the weight is negative."""


@dataclass(frozen=True)
class BestMetric:
    """The metric that decides.

    Attributes:
        name: As in `metrics.jsonl`.
        higher_is_better: Whether its best value is the largest.
        is_kept: Whether the best checkpoint is kept; otherwise the metric only serves `ppo.eval_patience`.
    """

    name: str
    higher_is_better: bool
    is_kept: bool = True


def best_metric(config: Config, stage: str) -> BestMetric | None:
    """The metric of `checkpoint.keep_best` in a stage; None if no checkpoint is the best one.

    Raises:
        ConfigError: It is not such a metric of the stage, or the run does not measure it.
    """
    wanted, evaluation = config.checkpoint.keep_best, config.ppo.evaluation
    held_out = "eval/win_rate" if config.evaluate.judge else "eval/score"
    evaluates = stage == "ppo" and evaluation.eval_every is not None
    if stage == "ppo" and evaluation.eval_patience is not None:
        if not evaluates:
            raise ConfigError("ppo.eval_patience counts evaluations: set ppo.eval_every")
        if wanted not in ("auto", "none") and not wanted.startswith("eval/"):
            raise ConfigError(f"ppo.eval_patience needs a held-out metric in checkpoint.keep_best, not {wanted}")
    in_chain = any(_has(name, wanted) for name in BETTER if name != "control")
    if stage == "rlhf" and wanted not in ("auto", "none") and not in_chain:
        _check(config, "ppo", wanted, evaluates=True)
    if stage == "control":
        evaluates, held_out = config.control.eval_every is not None, "eval/return_mean"
    if stage not in BETTER or wanted in ("auto", "none"):
        return BestMetric(held_out, HIGHER, is_kept=wanted == "auto") if evaluates else None
    _check(config, stage, wanted, evaluates=evaluates)
    return BestMetric(wanted, BETTER[stage].get(wanted, HIGHER))


def metric_in_chain(config: Config, stage: str) -> str:
    """`checkpoint.keep_best` for one stage of a chain: auto if the metric is another stage's."""
    wanted = config.checkpoint.keep_best
    return wanted if wanted == "none" or _has(stage, wanted) else "auto"


def _has(stage: str, metric: str) -> bool:
    return metric in BETTER[stage] or (stage == "ppo" and metric.startswith(TERMS))


def _check(config: Config, stage: str, wanted: str, *, evaluates: bool) -> None:
    known = BETTER[stage]
    if not _has(stage, wanted):
        raise ConfigError(
            f"checkpoint.keep_best={wanted} is not a metric of {stage} that tells which model is better"
            f"{suggestion(wanted, known)}; choose auto, none, {', '.join(known)}"
            f"{' or the score of a reward term (eval/score/NAME)' if stage == 'ppo' else ''}"
        )
    for term in config.reward if stage == "ppo" else ():
        name = term.name or term.source.rpartition(":")[2]
        if term.weight < 0 and wanted in (f"{prefix}{name}" for prefix in TERMS):
            raise ConfigError(
                f"checkpoint.keep_best={wanted}: the weight of this term is negative, so that a lower score is better"
            )
    if stage == "ppo" and wanted.startswith("eval/") and not evaluates:
        raise ConfigError(f"checkpoint.keep_best={wanted} is measured on held-out prompts: set ppo.eval_every")
    if wanted == "eval/win_rate" and not config.evaluate.judge:
        raise ConfigError("checkpoint.keep_best=eval/win_rate needs a judge: set evaluate.judge")
    if stage == "control":
        if wanted.startswith("eval/") and not evaluates:
            raise ConfigError(f"checkpoint.keep_best={wanted} is measured in evaluations: set control.eval_every")
        return
    if stage != "ppo" and wanted.startswith("eval/") and not config.data.eval_fraction:
        raise ConfigError(f"checkpoint.keep_best={wanted} is measured on held-out rows: set data.eval_fraction above 0")
