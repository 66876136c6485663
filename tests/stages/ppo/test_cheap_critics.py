"""Critics without gradients: a read-out that is refitted after every update, and a frozen critic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kedge.stages.ppo import guarding, run_ppo
from kedge.stages.ppo.result import PpoResult
from kedge.stages.ppo.roles import Roles
from kedge.training import controllers
from kedge.training.controllers import FrozenCritic
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times, varied
from tests.tiny import save_tiny_policy, save_tiny_reward_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "critic", seed=5)


def run(policy: Path, out: Path, *, on_update: Any = None, **settings: Any) -> PpoResult:
    config = configure(policy, out, **{"num_prompts": 8, "num_updates": 3, **settings})
    return run_ppo(config, prompts=PROMPTS, reward=varied, on_update=on_update)


CLEAR: dict[str, Any] = {"kl_coef": 0.0, "missing_eos_score": None}
"""The returns are the scores."""


def of_the_prompt(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """What a linear read-out of a random model can predict in part."""
    return [len(prompt) / 10 for prompt in prompts]


def test_a_readout_learns_what_its_states_tell_and_is_saved(policy: Path, tmp_path: Path) -> None:
    heads: list[dict[str, torch.Tensor]] = []

    def see(update: int, roles: Roles) -> None:
        assert roles.actor_critic.value_head is not None
        heads.append({name: each.clone() for name, each in roles.actor_critic.value_head.state_dict().items()})
        optimized = {id(each) for group in roles.optimizer.param_groups for each in group["params"]}
        assert not optimized & {id(each) for each in roles.actor_critic.critic_parameters()}

    config = configure(policy, tmp_path / "run", critic="readout", num_prompts=24, num_updates=3, **CLEAR)
    rows = run_ppo(config, prompts=PROMPTS, reward=of_the_prompt, on_update=see).metrics
    explained = [row["value/explained_variance"] for row in rows]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # measured before the first fit, at the mean return
    assert explained[1] > 0.01
    assert not any(name in row for row in rows for name in ("value/loss", "value/grad_norm", "value/clip_fraction"))
    saved = load_file(tmp_path / "run/model/value_head/model.safetensors")
    assert all(torch.equal(saved[name], each) for name, each in heads[-1].items())
    assert not torch.equal(heads[0]["weight"], heads[1]["weight"])


@pytest.mark.parametrize(
    "settings", [{"num_minibatches": 1, "num_epochs": 1}, {"num_critic_epochs": 2, "early_stop_kl": 1e-4}, {}]
)
def test_a_readout_trains_the_policy_as_a_head_without_a_loss(
    policy: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """To the bit, where the advantages do not use it; and for the FLOPs of a run without a critic."""
    critics = ("none", "detached", "readout")
    for kind in critics:
        used = {"num_critic_epochs": 1} if kind == "none" else {"value_coef": 0.0}
        run(policy, tmp_path / kind, critic=kind, advantage="to_go", **{**settings, **used})
    models = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("detached", "readout")]
    assert models[0] == models[1]
    none, _, readout = ([row["cost/sft_steps"] for row in metrics_without_times(tmp_path / name)] for name in critics)
    # A new head starts at the first returns, for which the first pass cannot be shared.
    assert readout[1:] == none[1:]


def test_settings_of_a_loss_are_unused(policy: Path, tmp_path: Path) -> None:
    others = {"value_loss": "hl_gauss", "value_coef": 3.0, "value_head_rate": 1.0, "num_critic_epochs": 2}
    run(policy, tmp_path / "plain", critic="readout")
    run(policy, tmp_path / "others", critic="readout", **others)
    one, other = (metrics_without_times(tmp_path / name) for name in ("plain", "others"))
    assert one == other


def test_a_readout_is_fitted_while_the_policy_waits(policy: Path, tmp_path: Path) -> None:
    settings = {"num_prompts": 24, "num_updates": 4, "value_warmup_updates": 2, **CLEAR}
    config = configure(policy, tmp_path / "run", critic="readout", **settings)
    rows = run_ppo(config, prompts=PROMPTS, reward=of_the_prompt).metrics
    assert [row["value/warmup"] for row in rows] == [1, 1, 0, 0]
    assert rows[1]["value/explained_variance"] > 0.01
    assert [row["policy/optimizer_steps"] for row in rows] == [0, 0, 4, 4]
    assert rows[1]["flops/train"] == pytest.approx(rows[1]["flops/rollout"])  # a pass that reads the states


def test_a_frozen_critic_stays_to_the_bit_and_has_no_optimizer_state(
    policy: Path, critic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controllers, "BLIND_UPDATES", 3)
    weights = load_file(critic / "model.safetensors")
    same: list[bool] = []
    states: list[int] = []

    def see(update: int, roles: Roles) -> None:
        found = roles.actor_critic.critic
        assert found is not None
        named = dict(found.classifier.named_parameters())
        same.append(all(torch.equal(each, weights[name]) for name, each in named.items()))
        states.append(sum(each in roles.optimizer.state for each in named.values()))
        assert all(each.grad is None for each in named.values())

    result = run(policy, tmp_path / "run", critic="frozen", critic_init=str(critic), num_updates=5, on_update=see)
    rows = result.metrics
    assert sum(row["value/explained_variance"] for row in rows[:3]) < 0  # a random critic
    assert [row["value/frozen"] for row in rows] == [1, 1, 1, 0, 0]
    assert same == [True, True, True, False, False]
    assert states[:3] == [0, 0, 0]
    assert states[3] > 0
    for name in ("value/grad_norm", "value/loss"):
        assert [name in row for row in rows] == [False, False, False, True, True]
    assert "The critic is trained from update 4 on: frozen, it explained -" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"num_minibatches": 1, "num_epochs": 1}, {"num_minibatches": 4}])
def test_a_frozen_critic_costs_one_forward_pass(
    policy: Path, critic: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    def train_and_experience(name: str, kind: str) -> tuple[float, float]:
        given = {} if kind == "none" else {"critic_init": str(critic)}
        rows = run(policy, tmp_path / name, critic=kind, advantage="to_go", num_updates=1, **given, **settings).metrics
        return rows[0]["flops/train"], rows[0]["flops/experience"]

    none, frozen = train_and_experience("none", "none"), train_and_experience("frozen", "frozen")
    separate = train_and_experience("separate", "separate")
    assert frozen[0] == none[0] < separate[0]
    assert frozen[1] > none[1]


def pooled(*updates: tuple[float, float]) -> list[str | None]:
    """What is said after updates with these explained variances and standard deviations."""
    critic = FrozenCritic(lambda: None)
    metrics = [{"value/explained_variance": explained, "value/returns_std": std} for explained, std in updates]
    return [critic.observe(number, each) for number, each in enumerate(metrics, 1)]


def test_a_critic_is_thawed_by_five_updates_together() -> None:
    assert not any(pooled(*[(-1.0, 1.0)] * 4))
    assert pooled(*[(-0.1, 1.0)] * 5)[-1] is not None
    assert pooled(*[(0.0, 1.0)] * 5)[-1] is not None  # a constant
    assert not any(pooled(*[(0.1, 1.0)] * 9))
    # A single batch in which almost all returns are equal, or all, says little.
    assert not any(pooled(*[(0.2, 1.0)] * 4, (-50.0, 0.1), *[(0.2, 1.0)] * 4))
    assert not any(pooled(*[(0.0, 0.0)] * 9))
    assert sum(said is not None for said in pooled(*[(-0.1, 1.0)] * 9)) == 1


def test_a_frozen_critic_is_no_trained_role(policy: Path, critic: Path, tmp_path: Path) -> None:
    run(policy, tmp_path / "run", critic="frozen", critic_init=str(critic), num_updates=1)
    roles = json.loads((tmp_path / "run/roles.json").read_text(encoding="utf-8"))
    assert (roles["critic"]["trained"], roles["critic"]["optimizer_bytes"]) == (False, 0)


def test_the_first_step_of_a_thawed_critic_is_no_spike(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "BLIND_UPDATES", 3)
    monkeypatch.setattr(guarding, "SPIKE_HISTORY", 8)
    guarded = {"on_spike": "skip", "value_coef": 100.0, "num_updates": 4}
    rows = run(policy, tmp_path / "run", critic="frozen", critic_init="policy", **guarded).metrics
    assert [row["value/frozen"] for row in rows] == [1, 1, 1, 0]
    assert rows[3]["guard/skipped_steps"] == 0
