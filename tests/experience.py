"""Experience from a rollout and its scores, with the settings of models and estimation by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kedge.algorithm.experience import Experience, Rollout
from kedge.models import ActorCritic, LanguageModel
from kedge.rollout import Estimation, Models, evaluate_rollout, experience_from


def collected(
    rollout: Rollout, scores: Tensor, actor_critic: ActorCritic, reference: LanguageModel | None, **settings: Any
) -> Experience:
    """Evaluate responses and estimate their advantages; settings are fields of `Models`, `Estimation` and the scores,
    or arguments of `evaluate_rollout` and `experience_from`.
    """

    def chosen(names: Iterable[str]) -> dict[str, Any]:
        return {name: settings.pop(name) for name in names if name in settings}

    given = {"token_scores": None, "baseline": None, **chosen(["token_scores", "baseline"])}
    scored: Any = SimpleNamespace(rollout=rollout, scores=scores, **given)
    models = Models(actor_critic, reference, **chosen(each.name for each in fields(Models)))
    estimation = Estimation(**chosen(each.name for each in fields(Estimation)))
    first_pass = settings.pop("first_pass", None)
    outputs = evaluate_rollout(rollout, models, value_after_last=estimation.value_after_last, first_pass=first_pass)
    return experience_from(scored, outputs, models, estimation, **settings)
