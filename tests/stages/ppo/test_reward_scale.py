"""The critic learns in the unit of its returns: what a run learns does not depend on the unit of the reward."""

import pytest
import torch

from kedge.config import config_from_settings
from kedge.stages.ppo import run_ppo
from tests.tiny import save_tiny_policy, save_tiny_reward_model

PROMPTS = ["The boat lay", "Once upon a time", "A little sailor", "The crew hauled"]
UNITS = {"hundredth, high": (0.01, 0.1), "1,024, low": (1024.0, -10240.0)}
"""Factors of the scores with what is added to them, ten times their unit: each unit shows mistakes in both."""
ROUNDING = 2e-3
"""Of float32 after three updates: a shift of 10 takes four binary digits from scores below 1."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_policy(folder / "policy"), save_tiny_reward_model(folder / "reward")


def run(models, out, unit, *, critic, by_model, **settings):
    """A run's policy, and in its unit of the reward, explained variance and error of the mean value per update."""
    scale, shift = unit
    policy, scorer = models
    if by_model:
        settings["reward"] = {str(scorer): scale}
        shift = 0.0
    config = config_from_settings(
        "ppo",
        {
            "model": str(policy),
            "out": str(out),
            "critic": critic,
            "kl_coef": 0.0,
            "num_updates": 3,
            "num_prompts": 4,
            "num_responses": 4,
            "max_new_tokens": 8,
            "learning_rate": 3e-3,
            "missing_eos_score": None,
            "seed": 1,  # with 0, a token lies on the edge of two within this rounding
            "report": False,
            "num_fixed_prompts": 0,
            **settings,
        },
    )
    weights: list[torch.Tensor] = []

    def score(completions):
        return [shift + scale * sum(map(str.isalpha, text)) / 8 for text in completions]

    def keep(update, roles):
        weights[:] = [each.detach().clone() for each in roles.actor_critic.policy.causal.parameters()]

    rows = run_ppo(config, prompts=PROMPTS, reward=None if by_model else [score], on_update=keep).metrics
    explained = [row["value/explained_variance"] for row in rows]
    errors = [(row["value/mean"] - row["value/returns_mean"]) / scale for row in rows]
    return torch.cat([each.flatten() for each in weights]), explained, errors


@pytest.mark.parametrize(
    "settings",
    [
        {"critic": "shared", "by_model": False},
        {"critic": "separate", "by_model": False, "num_critic_epochs": 2},  # with steps of the critic alone
        {"critic": "separate", "by_model": True},
    ],
    ids=["shared", "separate", "reward model"],
)
def test_what_is_learned_does_not_depend_on_the_unit(settings, models, tmp_path):
    policy, explained, errors = run(models, tmp_path / "1", (1.0, 0.0), **settings)
    assert max(map(abs, explained)) > 0.05, "there is something to lose"
    units = UNITS if settings["critic"] == "shared" else {"1,024, low": UNITS["1,024, low"]}
    for name, unit in units.items():
        other, others_explained, others_errors = run(models, tmp_path / name, unit, **settings)
        assert others_explained == pytest.approx(explained, abs=ROUNDING), name
        assert others_errors == pytest.approx(errors, abs=ROUNDING), name
        assert float((policy - other).abs().max()) < ROUNDING, name


def test_the_head_of_another_run_starts_in_the_unit_of_this_one(models, tmp_path, capsys):
    run(models, tmp_path / "first", (1024.0, 0.0), critic="shared", by_model=False)
    trained = (tmp_path / "first/model", models[1])
    capsys.readouterr()
    _, explained, errors = run(trained, tmp_path / "second", (1.0, 0.0), critic="shared", by_model=False)
    assert f"the critic continues with the value head that is saved with {trained[0]}" in capsys.readouterr().err
    assert errors[0] == pytest.approx(0.0, abs=1e-2)
    assert min(explained) > -1.0


def test_the_papers_unit_is_the_score(models, tmp_path):
    _, _, errors = run(models, tmp_path, (1024.0, 0.0), critic="separate", by_model=False, value_unit="score")
    assert min(map(abs, errors)) > 0.3, "the mean value is still far from the mean return"


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_returns_that_are_all_equal_are_no_unit(critic, models, tmp_path):
    """The first responses score the same; the critic starts when they no longer do."""
    scores = iter([[5.0] * 16, [5.0] * 16, *([5.0, 105.0] * 8 for _ in range(3))])

    def rare(completions):
        return next(scores) if len(completions) == 16 else [5.0] * len(completions)

    config = config_from_settings(
        "ppo",
        {
            "model": str(models[0]),
            "out": str(tmp_path / "run"),
            "critic": critic,
            "kl_coef": 0.0,
            "num_updates": 4,
            "num_prompts": 4,
            "num_responses": 4,
            "max_new_tokens": 4,
            "missing_eos_score": None,
            "gae_lambda": 1.0,
        },
    )
    rows = run_ppo(config, prompts=PROMPTS, reward=[rare]).metrics
    assert [row["value/mean"] for row in rows[:2]] == pytest.approx([5.0, 5.0])
    assert rows[2]["value/mean"] == pytest.approx(55.0, rel=1e-5)
