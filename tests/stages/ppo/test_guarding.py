"""Faults injected into real PPO runs: no broken step is taken, and the responsible response is reported."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace

import pytest
import torch

from kedge.models import ActorCritic
from kedge.rollout import Sampler
from kedge.rollout import experience as rollout_experience
from kedge.runs.run import Resume
from kedge.stages.ppo import guarding, run_ppo
from kedge.stages.ppo import trainer as ppo_trainer
from kedge.stages.ppo.measurements import Measurements
from kedge.training.guard import Guard, UpdateDropped
from kedge_base.errors import NumericsError
from kedge_base.run_folder.output import INCIDENTS_FILE
from kedge_base.run_folder.record_format import read_json_lines, read_metrics, read_samples
from tests.forking import forked_kedge
from tests.stages.ppo.test_ppo import PROMPTS, configure, copies_at, metrics_without_times, vowels
from tests.stages.test_resume import assert_same
from tests.tiny import save_tiny_policy, save_tiny_reward_model

STEPS = 4  # two epochs of two minibatches


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture
def configured(policy, tmp_path):
    def configured(name="run", **settings):
        defaults = {"num_updates": 5, "reward_functions.retries": 0, "checkpoint.every": 2}
        return configure(policy, tmp_path / name, **{**defaults, **settings})

    return configured


class Clockwork:
    """A reward that counts its calls, one per update, and does something in some of them."""

    def __init__(self, *updates, act=lambda scores: None):
        self.updates, self.act, self.call = updates, act, 0

    def __call__(self, completions, **_):
        self.call += 1
        scores = vowels(completions)
        if self.call in self.updates:
            self.act(scores)
        return scores


def set_nan(scores):
    scores[2] = math.nan


def snapshots(taken):
    """Note all weights and moments after each update."""

    def note(update, roles):
        gathered = sorted(roles.optimizer.state_dict()["state"].items())
        moments = [state[name] for _, state in gathered for name in sorted(state)]
        taken[update] = [tensor.clone() for tensor in (*roles.actor_critic.state_dict().values(), *moments)]

    return note


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def sabotage(monkeypatch):
    """Change the input of some updates' PPO step, or call a function before it."""

    def arrange(*updates, change=lambda experience: experience):
        update_once, calls = ppo_trainer.PpoUpdate, []

        def sabotaged(models, optimizer, experience, *rest, **settings):
            calls.append(experience)
            experience = change(experience) if len(calls) in updates else experience
            return update_once(models, optimizer, experience, *rest, **settings)

        monkeypatch.setattr(ppo_trainer, "PpoUpdate", sabotaged)

    return arrange


def test_a_score_that_is_nan_stops_the_run_and_names_function_and_response(configured, tmp_path):
    with pytest.raises(NumericsError, match="update 3: judge gave response 2 nan") as caught:
        run_ppo(configured(), prompts=PROMPTS, reward=named("judge", Clockwork(3, act=set_nan)))
    assert "\n" not in str(caught.value)
    assert [row["update"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    [incident] = read_json_lines(tmp_path / "run" / INCIDENTS_FILE)
    told = {name: incident[name] for name in ("update", "kind", "consequence", "row", "token")}
    assert told == {"update": 3, "kind": "nonfinite", "consequence": "stop", "row": 2, "token": None}
    assert incident["prompt"] in PROMPTS
    assert len(incident["tokens"]) == len(incident["sampler_logprobs"]) > 0
    assert (tmp_path / "run/model/model.safetensors").exists()


def named(name, reward):
    reward.__name__ = name
    return reward


def test_a_function_in_a_process_of_its_own_is_named_with_the_response_too(configured, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def judge(completions):\n    return [float('inf') if i == 1 else 0.0 for i in range(len(completions))]\n"
    )
    with pytest.raises(NumericsError, match="update 1: judge gave response 1 inf"):
        run_ppo(configured(reward=f"{tmp_path}/rewards.py:judge"), prompts=PROMPTS)
    # The run produced nothing: the diagnostic files remain, and the folder can be used again.
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["incidents.jsonl", "reward.log"]
    assert read_json_lines(tmp_path / "run" / INCIDENTS_FILE)[0]["row"] == 1
    run_ppo(configured(num_updates=1), prompts=PROMPTS, reward=vowels)
    assert not (tmp_path / "run/incidents.jsonl").exists()


def test_the_update_is_left_out_where_that_is_wanted(configured, tmp_path, capsys):
    taken, reward = {}, Clockwork(3, act=set_nan)
    run_ppo(configured(on_nonfinite="skip"), prompts=PROMPTS, reward=reward, on_update=snapshots(taken))
    said = capsys.readouterr().err
    assert said.index("serious: not_finite") < said.index("ppo 5/5")  # while it runs, by the update that was left out
    rows = read_metrics(tmp_path / "run")
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["guard/skipped_steps"] for row in rows] == [0, 0, STEPS, 0, 0]
    assert rows[2] == {"update": 3, "guard/rolled_back": 0.0, "guard/skipped_steps": 4, "policy/optimizer_steps": 0}
    assert sorted(taken) == [1, 2, 4, 5]
    assert "updates | 5" in (tmp_path / "run/model/README.md").read_text()
    assert read_json_lines(tmp_path / "run" / INCIDENTS_FILE)[0]["consequence"] == "skip"


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(("rule", "back_to"), [("skip", 3), ("rollback", 2)])  # every second update is saved
def test_after_a_broken_step_the_weights_are_those_before_or_the_newest_checkpoints(
    configured, sabotage, tmp_path, critic, rule, back_to
):
    sabotage(4, change=lambda experience: replace(experience, advantages=experience.advantages * torch.nan))
    taken = {}
    config = configured(on_nonfinite=rule, critic=critic)
    run_ppo(config, prompts=PROMPTS, reward=vowels, on_update=snapshots(taken))
    assert [update for update in (1, 2, 3, 5) if equal(taken[4], taken[update])] == [back_to]
    rows = read_metrics(tmp_path / "run")
    assert [row["guard/rolled_back"] for row in rows] == [0, 0, 0, float(rule == "rollback"), 0]
    assert rows[3]["guard/skipped_steps"] == STEPS
    assert "policy/loss" not in rows[3]
    assert math.isfinite(rows[3]["reward/score_mean"])
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert {sample["update"] for sample in samples} == {1, 2, 3, 4, 5}


def test_there_is_always_something_to_go_back_to(configured, tmp_path):
    taken = {}
    config = configured(on_nonfinite="rollback", **{"checkpoint.every": None})
    run_ppo(config, prompts=PROMPTS, reward=Clockwork(1, 2, act=set_nan), on_update=snapshots(taken))
    assert [row["guard/rolled_back"] for row in read_metrics(tmp_path / "run")] == [1, 1, 0, 0, 0]
    assert sorted(taken) == [3, 4, 5]


def test_a_log_probability_that_is_nan_is_traced_to_its_token(configured, sabotage, tmp_path, monkeypatch):
    guilty, forward = [], ActorCritic.forward

    def spoilt(self, rollout, **settings):
        outputs = forward(self, rollout, **settings)
        if not guilty or rollout.response_ids.shape[1] != guilty[0].shape[0]:
            return outputs
        rows = (rollout.response_ids == guilty[0]).all(-1).nonzero().flatten().tolist()
        logprobs = outputs.logprobs.clone()
        logprobs[rows, 1] = torch.nan
        return replace(outputs, logprobs=logprobs)

    def choose(experience):
        guilty.append(experience.rollout.response_ids[2])
        return experience

    monkeypatch.setattr(ActorCritic, "forward", spoilt)
    sabotage(3, change=choose)
    with pytest.raises(
        NumericsError, match=r"update 3: .* is nan in step \d: the policy's log prob.* at token 1 of re"
    ):
        run_ppo(configured(), prompts=PROMPTS, reward=vowels)
    [incident] = read_json_lines(tmp_path / "run" / INCIDENTS_FILE)
    assert (incident["row"], incident["token"]) == (2, 1)
    assert "nan" in incident["figures"].values()
    assert len(incident["advantages"]) == len(incident["tokens"])


def test_weights_that_are_broken_are_named_and_not_skipped(configured, tmp_path):
    models = []

    def break_critic(_):
        with torch.no_grad():
            models[0].actor_critic.critic.classifier.score.weight[0, 3] = torch.inf

    config = configured(critic="separate", on_nonfinite="skip")
    words = (
        r"update 3: the critic's value at token 0 of response 0 is (nan|-?inf); policy and critic: critic\.\S+ contains"
    )
    with pytest.raises(NumericsError, match=words):
        run_ppo(
            config,
            prompts=PROMPTS,
            reward=Clockwork(3, act=break_critic),
            on_update=lambda update, roles: models.append(roles),
        )
    assert read_json_lines(tmp_path / "run" / INCIDENTS_FILE)[0]["values"][0] in ("nan", "inf", "-inf")


def test_but_they_are_mended_by_going_back(configured, tmp_path):
    models, taken = [], {}

    def break_policy(_):
        with torch.no_grad():
            next(models[0].actor_critic.policy.causal.parameters())[:] = torch.nan

    def note(update, roles):
        models.append(roles)
        snapshots(taken)(update, roles)

    config = configured(on_nonfinite="rollback", **{"checkpoint.every": 1})
    run_ppo(config, prompts=PROMPTS, reward=Clockwork(3, act=break_policy), on_update=note)
    assert [row["guard/rolled_back"] for row in read_metrics(tmp_path / "run")] == [0, 0, 1, 0, 0]
    assert all(tensor.isfinite().all() for tensor in taken[5])


def test_a_broken_reference_is_told_from_a_broken_policy(configured):
    models = []

    def break_reference(_):
        with torch.no_grad():
            next(models[0].reference.causal.parameters())[:] = torch.nan

    words = "the reference's log probability at token 0 of response 0 is nan; the reference: .* contains nan"
    with pytest.raises(NumericsError, match=words):
        run_ppo(
            configured(on_nonfinite="skip"),
            prompts=PROMPTS,
            reward=Clockwork(3, act=break_reference),
            on_update=lambda update, roles: models.append(roles),
        )


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_new_critic_does_not_start_from_returns_that_are_nan(configured, tmp_path, critic, monkeypatch):
    """The first KL is broken; the critic starts from the returns of the second update."""
    real, calls = rollout_experience.response_logprobs, []

    def broken_once(*models, **settings):
        calls.append(real(*models, **settings))
        return calls[-1] * math.nan if len(calls) == 1 else calls[-1]

    monkeypatch.setattr(rollout_experience, "response_logprobs", broken_once)
    run_ppo(configured(on_nonfinite="skip", critic=critic, num_updates=3), prompts=PROMPTS, reward=vowels)
    rows = read_metrics(tmp_path / "run")
    assert [row["guard/skipped_steps"] for row in rows] == [STEPS, 0, 0]
    assert rows[1]["value/mean"] == pytest.approx(rows[1]["value/returns_mean"], abs=1e-5)


def test_a_reward_models_nan_is_named_with_the_model(configured, tmp_path):
    model = save_tiny_reward_model(tmp_path / "umpire", seed=3)

    def break_reward(update, roles):
        if update == 2:
            with torch.no_grad():
                next(roles.reward.sources[0].model.parameters())[:] = torch.nan

    words = "update 3: reward model 'umpire' gave response 0 nan; .*; umpire: .* contains nan"
    with pytest.raises(NumericsError, match=words):
        run_ppo(configured(reward=str(model), on_nonfinite="skip"), prompts=PROMPTS, on_update=break_reward)
    assert read_json_lines(tmp_path / "run" / INCIDENTS_FILE)[0]["row"] == 0


@pytest.mark.parametrize("rule", ["stop", "skip", "rollback"])
def test_a_gradient_spike_is_seen_and_the_response_behind_it(configured, sabotage, tmp_path, rule, monkeypatch):
    def exaggerate(experience):
        advantages = experience.advantages.clone()
        advantages[2] *= 1e5
        return replace(experience, advantages=advantages)

    sabotage(4, change=exaggerate)
    taken = {}
    monkeypatch.setattr(guarding, "SPIKE_HISTORY", 8)
    config = configured(on_spike=rule)

    def run():
        run_ppo(config, prompts=PROMPTS, reward=vowels, on_update=snapshots(taken))

    if rule == "stop":
        with pytest.raises(NumericsError, match=r"update 4: policy/grad_norm is .* σ above the median of the last 8 "):
            run()
    else:
        run()
        assert equal(taken[4], taken[2]) == (rule == "rollback")
        skipped = [row["guard/skipped_steps"] for row in read_metrics(tmp_path / "run")]
        assert skipped[:3] == [0, 0, 0]
        assert skipped[3] > 0
        assert skipped[4] == 0
    incident = read_json_lines(tmp_path / "run" / INCIDENTS_FILE)[0]
    assert (incident["kind"], incident["update"], incident["row"]) == ("spike", 4, 2)


def test_what_happens_time_and_again_ends_the_run(configured, tmp_path):
    reward = Clockwork(2, 3, 4, 5, act=set_nan)
    with pytest.raises(NumericsError, match=r"update 4: .* the last 2 updates skipped steps"):
        run_ppo(configured(on_nonfinite="skip", max_skips=2), prompts=PROMPTS, reward=reward)
    assert [incident["consequence"] for incident in read_json_lines(tmp_path / "run" / INCIDENTS_FILE)] == [
        "skip",
        "skip",
        "stop",
    ]


@pytest.fixture
def mistaken_sampler(monkeypatch):
    """A sampler that notes half a nat too much, or too little, for each response's first token."""

    def arrange(shift):
        generate = Sampler.generate

        def mistaken(self, prompts, **settings):
            rollout = generate(self, prompts, **settings)
            rollout.logprobs[:, 0] += shift
            return rollout

        monkeypatch.setattr(Sampler, "generate", mistaken)

    return arrange


@pytest.mark.parametrize("shift", [0.5, -0.5])
@pytest.mark.parametrize("settings", [{"num_minibatches": 1}, {"num_minibatches": 2}, {"precision": "bf16"}], ids=str)
def test_sampler_and_trainer_that_disagree_are_doubted_once_and_refused_by_strict(
    configured, mistaken_sampler, tmp_path, capsys, settings, shift
):
    mistaken_sampler(2 * shift if "precision" in settings else shift)  # e^0.5 may be bf16's rounding
    run_ppo(configured(num_updates=2, **settings), prompts=PROMPTS, reward=vowels)
    assert capsys.readouterr().err.replace("\n", " ").count("sampler and trainer disagree") == 1
    [incident] = read_json_lines(tmp_path / "run" / INCIDENTS_FILE)
    assert (incident["kind"], incident["consequence"]) == ("mismatch", "warn")
    strict = configured("strict", strict=True, **settings)
    with pytest.raises(NumericsError, match=r"update 1: .*sampler and trainer disagree"):
        run_ppo(strict, prompts=PROMPTS, reward=vowels)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_healthy_run_passes_strict(configured, tmp_path, precision):
    config = configured(strict=True, precision=precision, num_updates=3, temperature=0.7, on_spike="skip")
    run_ppo(config, prompts=PROMPTS, reward=vowels)
    assert not (tmp_path / "run/incidents.jsonl").exists()


def test_a_run_that_left_something_out_goes_on_to_the_bit(configured, tmp_path, monkeypatch):
    def alarming(completions, seed, **_):
        scores = vowels(completions)
        if seed % 3 == 0:  # in some updates, regardless of the caller
            scores[0] = math.nan
        return scores

    settings = {"num_updates": 8, "on_nonfinite": "skip", "max_skips": 8, "on_spike": {"skip": 1.0}}
    monkeypatch.setattr(guarding, "SPIKE_HISTORY", 4)
    whole, split = (configured(name, **settings, **{"checkpoint.every": 1}) for name in ("whole", "split"))
    run_ppo(whole, prompts=PROMPTS, reward=alarming, on_update=copies_at(6, tmp_path / "whole", tmp_path / "split"))
    skipped = [row["guard/skipped_steps"] for row in metrics_without_times(tmp_path / "whole")]
    assert len({0, STEPS} & set(skipped)) == 2
    run_ppo(split, prompts=PROMPTS, reward=alarming, resume=Resume())
    assert_same(tmp_path / "split", tmp_path / "whole")


def test_a_run_that_resumes_from_its_start_has_the_samples_of_the_start_once(configured, tmp_path, monkeypatch):
    config = configured(on_nonfinite="rollback", num_updates=1, num_fixed_prompts=2)  # which saves the start
    with monkeypatch.context() as patch:
        patch.setattr(ppo_trainer.Trainer, "improve", lambda *_, **__: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            run_ppo(config, prompts=PROMPTS, reward=vowels)
    assert (tmp_path / "run" / "checkpoints" / "update-000000").is_dir()
    run_ppo(config, prompts=PROMPTS, reward=vowels, resume=Resume())
    assert [row["fixed"] for row in read_samples(tmp_path / "run") if row["update"] == 0] == [0, 1]


def test_a_run_that_was_stopped_by_nan_goes_on_without_it(configured, tmp_path):
    def alarming(update):
        return Clockwork(update, act=set_nan)

    with pytest.raises(NumericsError):
        run_ppo(configured(), prompts=PROMPTS, reward=alarming(4))
    run_ppo(
        configured(on_nonfinite="skip"),
        prompts=PROMPTS,
        reward=alarming(1),  # the first that is asked for now
        resume=Resume(("ppo.on_nonfinite",)),
    )
    rows = read_metrics(tmp_path / "run")
    assert [row["guard/skipped_steps"] for row in rows] == [0, 0, 0, STEPS, 0]
    assert [incident["consequence"] for incident in read_json_lines(tmp_path / "run" / INCIDENTS_FILE)] == [
        "stop",
        "skip",
    ]


def test_the_command_says_it_in_one_line(policy, tmp_path):
    (tmp_path / "rewards.py").write_text("def judge(completions):\n    return [float('nan')] * len(completions)\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    done = forked_kedge(
        "ppo", "--model", policy, "--prompts", "prompts.jsonl", "--reward", "rewards.py:judge", "--out", "run",
        "--strict", "rollout.num_prompts=4", "rollout.max_new_tokens=4", "reward_functions.retries=0", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        "error: update 1: judge gave response 0 nan; expected a finite number, or None for no score; the step was "
        "not taken (ppo.on_nonfinite=skip would continue without it)"
    ]


def test_no_model_outlives_its_run(configured):
    held = []
    gc.collect()
    gc.disable()  # what only the collector of cycles finds holds its memory while the next stage loads
    try:
        run_ppo(
            configured(on_nonfinite="rollback", num_updates=1),
            prompts=PROMPTS,
            reward=vowels,
            on_update=lambda update, roles: held.append(weakref.ref(roles.actor_critic)),
        )
        assert [reference() for reference in held] == [None]
    finally:
        gc.enable()


def test_a_dropped_update_frees_its_first_pass_before_it_is_measured(configured, monkeypatch):
    def drop(*_):
        raise UpdateDropped

    learners = []
    monkeypatch.setattr(Guard, "check_experience", drop)
    monkeypatch.setattr(Measurements, "metrics", lambda self, _: learners.append(self._trainer._learner) or {})
    run_ppo(configured(num_updates=1), prompts=PROMPTS, reward=vowels)
    assert learners == [None]
