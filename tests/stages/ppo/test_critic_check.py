"""Checks of the critic: the returns of continuations by a slow loop, what is logged, and where it is refused."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge.algorithm.prefix_test import prefix_test
from kedge.config import schedule_in_words
from kedge.config.loading.load import with_values
from kedge.models import response_logprobs
from kedge.ranks import ALONE
from kedge.stages.ppo import measurements, run_ppo
from kedge.stages.ppo.trainer import Trainer
from kedge_base.errors import ConfigError, KedgeError
from kedge_base.run_folder.record_format import CRITIC_CHECKS_FILE, read_json_lines
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times
from tests.tiny import save_tiny_policy

HELD_OUT = ["The crew", "A rope", "Then the sun"]
GAMMA, BETA = 0.9, 0.3
SETTINGS: dict[str, Any] = {
    "critic_check": 2,
    "ppo.critic_check.size": [32, 2, 3],
    "num_updates": 3,
    "gamma": GAMMA,
    "kl_coef": BETA,
    "missing_eos_score": -2.0,
}


def vowels(completions: list[str], **_: Any) -> list[float | None]:
    """Every vowel counts; a response with a "q" has no score."""
    return [None if "q" in text else sum(letter in "aeiou" for letter in text) / 10 for text in completions]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A run with checks, and its models after the last update."""
    place = tmp_path_factory.mktemp("checked")
    config = configure(save_tiny_policy(place / "policy"), place / "run", **SETTINGS)
    kept: dict[str, Any] = {}
    with redirect_stderr(io.StringIO()) as printed:
        result = run_ppo(
            config,
            prompts=PROMPTS,
            eval_prompts=HELD_OUT,
            reward=vowels,
            on_update=lambda _, roles: kept.update(roles=roles),
        )
    lines = printed.getvalue().splitlines()
    return SimpleNamespace(folder=result.folder, config=config, roles=kept["roles"], lines=lines)


def trainer_of(checked: Any) -> Trainer:
    """The trainer of the run."""
    run: Any = SimpleNamespace(precision="fp32", micro_batch_tokens=None, ranks=ALONE)
    return Trainer.of(checked.config, run, checked.roles)


def test_the_start_every_interval_and_the_end_are_checked(checked):
    rows = read_json_lines(checked.folder / CRITIC_CHECKS_FILE)
    assert [row["update"] for row in rows] == [0, 2, 3]
    logged = {row["update"]: row for row in metrics_without_times(checked.folder)}
    assert not [name for name in logged[1] if name.startswith("critic/")]
    for row in rows[1:]:
        assert logged[row["update"]]["critic/pairs_across"] == row["pairs_across"]["value"]
        assert row["pairs_across"]["low"] <= row["pairs_across"]["value"] <= row["pairs_across"]["high"]
    assert rows[0]["bins"][0]["value"] == 0.0  # the head starts at 0
    assert rows[0]["pairs_across"]["value"] == 0.5
    assert all(1 <= each["tokens"] < each["of"] for row in rows for each in row["prefixes"])


def test_each_check_prints_a_line(checked):
    rows = read_json_lines(checked.folder / CRITIC_CHECKS_FILE)
    across, within = ("{value:.2f} ({low:.2f}–{high:.2f})".format(**rows[2][f"pairs_{name}"])
                      for name in ("across", "within"))  # fmt: skip
    said = [line for line in checked.lines if line.startswith("critic check after update ")]
    assert [line.partition(": ")[0].removeprefix("critic check after update ") for line in said] == ["0", "2", "3"]
    assert said[2].endswith(f": ordered pairs {across} across prompts, {within} within a prompt; chance is 0.50")


@pytest.mark.parametrize(("credit", "gamma"), [("token", GAMMA), ("turn", 1.0)])
@torch.no_grad()
def test_returns_to_go_equal_those_of_a_slow_loop(checked, credit, gamma, monkeypatch):
    """A response is one turn, within which nothing is discounted."""
    roles = checked.roles
    config = with_values(checked.config, {"ppo.credit": credit})
    trainer = trainer_of(SimpleNamespace(config=config, roles=roles))
    caught: dict[str, Any] = {}
    sample = measurements.sample_continuations

    def catch(*arguments: Any, **settings: Any) -> Any:
        caught.update(rows=arguments[2], cuts=arguments[3], whole=sample(*arguments, **settings))
        return caught["whole"]

    monkeypatch.setattr(measurements, "sample_continuations", catch)
    found = measurements.sample_prefixes(trainer, roles.prompts.held_out, num_prefixes=2, num_continuations=3)
    whole = caught["whole"]
    logprobs, ref = (
        response_logprobs(model, whole, temperature=1.0) for model in (roles.actor_critic.policy, roles.reference)
    )
    assert (logprobs - ref).abs().max() > 1e-3
    values = roles.actor_critic(whole, temperature=1.0).values
    expected: dict[tuple[int, int], list[tuple[float, float] | None]] = {}
    for row, (source, cut) in enumerate(zip(caught["rows"], caught["cuts"], strict=True)):
        length, stopped = int(whole.response_lengths[row]), bool(whole.stopped[row])
        text = roles.tokenizer.decode(whole.response_ids[row, : length - stopped])
        score = vowels([text])[0]
        penalties = [BETA * float(logprobs[row, slot] - ref[row, slot]) for slot in range(length)]
        rewards = [-penalty for penalty in penalties]
        rewards[-1] += -2.0 if not stopped else score or 0.0
        to_go = sum(gamma ** (slot - cut) * rewards[slot] for slot in range(cut, length))
        known = None if score is None else (to_go, float(values[row, cut]))
        expected.setdefault((source, cut), []).append(known)
    of_prompt = [[each[0] for each in expected[2 * prompt, 0] if each is not None] for prompt in range(len(HELD_OUT))]
    cut = [(key, each) for key, each in expected.items() if key[1] and sum(one is not None for one in each) > 1]
    assert found.num == len(cut) > 3
    assert found.prompts.tolist() == [source // 2 for (source, _), _ in cut]
    assert found.tokens.tolist() == [start for (_, start), _ in cut]
    for row, ((source, _), each) in enumerate(cut):
        returns = [one[0] for one in each if one is not None]
        assert found.returns[row][~found.returns[row].isnan()].tolist() == pytest.approx(returns, abs=1e-4)
        assert float(found.values[row]) == pytest.approx(next(one[1] for one in each if one is not None), abs=1e-4)
        others = of_prompt[source // 2]
        assert float(found.prompt_returns[row]) == pytest.approx(sum(others) / len(others), abs=1e-4)


def test_a_run_without_a_critic_is_refused():
    with pytest.raises(ConfigError, match=r"ppo.critic_check=5 checks a critic, and this run has none"):
        configure("policy", "out", advantage="to_go", critic_check=5)


def test_held_out_prompts_are_needed(checked, tmp_path):
    config = configure(checked.config.model, tmp_path / "run", **SETTINGS, eval_fraction=0.0)
    with pytest.raises(KedgeError, match=r"ppo.critic_check needs held-out prompts"):
        run_ppo(config, prompts=PROMPTS, reward=vowels)


def test_the_schedule_says_what_checks_cost():
    words = schedule_in_words(configure("policy", "out", **SETTINGS), 100, 2)
    # 2 prompts: 4 responses, and 4 prefixes and the 2 prompts with 3 responses each, three times.
    assert "3 checks, at most 66 responses" in words


def test_a_perfect_critic_passes(checked):
    roles = checked.roles
    trainer = trainer_of(checked)
    found = measurements.sample_prefixes(trainer, roles.prompts.held_out, num_prefixes=2, num_continuations=3)
    test = prefix_test(found.returns.nanmean(-1), found.returns, found.prompt_returns, found.prompts)
    assert test.pairs_across is not None
    assert test.pairs_across.value == 1.0
    assert torch.equal(found.prompts, found.prompts.sort().values)
