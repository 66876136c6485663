"""The guard's decisions: which updates and steps pass; stop, skip, rollback and their limits."""

from dataclasses import replace

import pytest
import torch

from kedge.training.guard import BadValue, Guard, SpikeDetector, refuse_nonfinite
from kedge_base.errors import NonfiniteScoreError, NumericsError
from kedge_base.run_folder.record_format import MAX_RATIO
from tests.training.test_update import make_experience, make_models

OPTIONS = {
    "on_nonfinite": "stop",
    "on_spike": "skip",
    "max_skips": 3,
    "max_ratio": MAX_RATIO["fp32"],
    "strict": False,
}
FINE = {"loss/total": 0.5, "policy/grad_norm": 1.0, "policy/ratio_min": 1.0, "policy/ratio_max": 1.0}


class Watched:
    """A guard, and everything that it asks for."""

    def __init__(self, *, sigma=None, dead=(), **rules):
        self.incidents, self.warnings, self.rollbacks = [], [], 0
        self.dead = list(dead)  # the result of each search
        self.guard = Guard(
            **{**OPTIONS, **rules},
            spikes=None if sigma is None else SpikeDetector(sigma=sigma, history=2),
            record=self.incidents.append,
            warn=self.warnings.append,
            roll_back=self.roll_back,
            find_bad_weight=lambda: self.dead.pop(0) if self.dead else None,
        )

    def roll_back(self):
        self.rollbacks += 1

    def step(self, update, figures, *, offender=None):
        """An update of one step; whether it was taken."""
        with self.guard.watching(update, num_passes=4, num_minibatches=2):
            figures = {**FINE, **figures}
            allowed = self.guard.allows(0, figures, lambda: offender or BadValue("the loss", torch.nan, 2))
            if allowed:
                self.guard.takes(figures)
            return allowed


@pytest.fixture
def experience():
    return make_experience(make_models())


def test_what_is_fine_passes(experience):
    watched = Watched(sigma=5.0)
    with watched.guard.watching(1, num_passes=4, num_minibatches=2):
        watched.guard.check_rollout(experience.rollout)
        watched.guard.check_experience(experience)
        assert watched.guard.allows(0, FINE, pytest.fail)
    assert watched.guard.metrics() == {"guard/skipped_steps": 0, "guard/rolled_back": 0.0}
    assert (watched.incidents, watched.warnings) == ([], [])


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_experience_that_is_broken_ends_its_update(policy, experience):
    watched = Watched(on_nonfinite=policy)
    values = experience.values.clone()
    values[1, 0] = torch.nan
    with watched.guard.watching(3, num_passes=4, num_minibatches=2):
        watched.guard.check_experience(replace(experience, values=values))
        pytest.fail("the update went on")
    assert watched.guard.dropped
    assert watched.rollbacks == (policy == "rollback")
    assert watched.guard.metrics() == {"guard/skipped_steps": 8, "guard/rolled_back": float(policy == "rollback")}
    [incident] = watched.incidents
    assert (incident.update, incident.kind, incident.consequence) == (3, "nonfinite", policy)
    assert (incident.row, incident.token, incident.what) == (
        1,
        0,
        "the critic's value at token 0 of response 1 is nan",
    )
    assert watched.warnings[0].startswith("update 3: the critic's value at token 0 of response 1 is nan; ")
    with watched.guard.watching(4, num_passes=4, num_minibatches=2):
        pass
    assert not watched.guard.dropped


def test_the_trainers_log_probabilities_are_checked_where_the_old_ones_are_the_samplers(experience):
    logprobs = experience.old_logprobs.clone()
    logprobs[2, 3] = torch.nan
    watched = Watched(on_nonfinite="skip")
    with watched.guard.watching(3, num_passes=4, num_minibatches=2):
        watched.guard.check_experience(replace(experience, recomputed_logprobs=logprobs))
    assert watched.guard.dropped
    assert watched.incidents[0].what == "the policy's log probability at token 3 of response 2 is nan"


def test_it_ends_the_run_by_default(experience):
    watched = Watched()
    logprobs = experience.rollout.logprobs.clone()
    logprobs[0, 1] = torch.nan
    words = r"update 7: the sampler's log probability at token 1 of response 0 is nan; .*ppo\.on_nonfinite=skip"
    with pytest.raises(NumericsError, match=words), watched.guard.watching(7, num_passes=4, num_minibatches=2):
        watched.guard.check_rollout(replace(experience.rollout, logprobs=logprobs))
    assert [incident.consequence for incident in watched.incidents] == ["stop"]


def test_a_score_that_is_not_finite_is_one_of_them(experience):
    watched = Watched(on_nonfinite="skip")
    with watched.guard.watching(2, num_passes=4, num_minibatches=2):
        watched.guard.check_rollout(experience.rollout)
        raise NonfiniteScoreError("judge gave response 4 inf", row=4)
    [incident] = watched.incidents
    assert (incident.row, incident.what, incident.evidence) == (4, "judge gave response 4 inf", experience.rollout)
    assert watched.guard.dropped
    watched = Watched(on_nonfinite="stop")
    with (
        pytest.raises(NumericsError, match="update 2: judge gave response 4 inf"),
        watched.guard.watching(2, num_passes=4, num_minibatches=2),
    ):
        raise NonfiniteScoreError("judge gave response 4 inf", row=4)


def test_a_step_that_is_not_finite_is_refused_and_the_steps_before_count():
    watched = Watched(on_nonfinite="skip")
    with watched.guard.watching(1, num_passes=4, num_minibatches=2):
        assert watched.guard.allows(0, FINE, pytest.fail)
        assert not watched.guard.allows(
            1, {**FINE, "policy/grad_norm": torch.inf}, lambda: BadValue("the gradient norm", torch.inf, 5)
        )
    assert not watched.guard.dropped  # what was taken is to be measured
    assert watched.guard.metrics()["guard/skipped_steps"] == 7
    [incident] = watched.incidents
    assert incident.what == "policy/grad_norm is inf in step 2: the gradient norm of response 5 is inf"
    assert incident.row == 5


@pytest.mark.parametrize(("num_minibatches", "skipped"), [(2, 8), (100, 4 * 8)])
def test_there_are_no_more_minibatches_than_responses(experience, num_minibatches, skipped):
    assert len(experience.action_mask) == 8
    watched = Watched(on_nonfinite="skip")
    with watched.guard.watching(1, num_passes=4, num_minibatches=num_minibatches):
        watched.guard.check_rollout(experience.rollout)
        raise NonfiniteScoreError("judge gave response 4 inf", row=4)
    assert watched.guard.metrics()["guard/skipped_steps"] == skipped


def test_a_step_that_the_kl_limit_left_out_is_skipped_if_the_one_in_its_place_is_refused():
    watched = Watched(on_nonfinite="skip", sigma=5.0)
    with watched.guard.watching(1, num_passes=4, num_minibatches=2):
        assert watched.guard.allows(0, FINE, pytest.fail)
        watched.guard.takes(FINE)
        assert watched.guard.allows(1, FINE, pytest.fail)  # exceeds the limit, so it is not taken
        assert watched.guard.spikes.state_dict()["loss/total"] == [0.5]
        assert not watched.guard.allows(1, {"value/loss": torch.inf}, lambda: BadValue("the loss", torch.inf, 5))
    assert watched.guard.metrics()["guard/skipped_steps"] == 7


def test_a_fault_that_does_not_come_again_is_told_as_such():
    watched = Watched(on_nonfinite="skip")
    assert not watched.step(1, {"loss/total": torch.nan}, offender=BadValue("the gradient norm", 1.5, 3))
    [incident] = watched.incidents
    assert incident.row is None
    assert incident.what.endswith("recomputed one by one, every response is finite")


def test_so_many_in_a_row_and_no_more():
    watched = Watched(on_nonfinite="skip", max_skips=2)
    for update, figure in enumerate((torch.nan, torch.nan, 0.5, torch.nan, torch.nan), start=1):
        assert watched.step(update, {"loss/total": figure}) == (figure == 0.5)
    restored = Watched(on_nonfinite="skip", max_skips=2)
    restored.guard.load_state_dict(watched.guard.state_dict())
    for guarded in (watched, restored):
        with pytest.raises(
            NumericsError, match=r"the last 2 updates skipped steps as well, the limit of ppo\.max_skips"
        ):
            guarded.step(6, {"loss/total": torch.nan})


def test_the_first_skip_ends_a_run_without_any():
    with pytest.raises(NumericsError, match=r"finite; ppo\.max_skips=0 lets no update skip steps$"):
        Watched(on_nonfinite="skip", max_skips=0).step(1, {"loss/total": torch.nan}, offender=BadValue("x", 1.0))


@pytest.mark.parametrize(
    ("policy", "dead", "rollbacks", "words"),
    [
        ("skip", ["it holds nan"], 0, "it holds nan, which skipping steps cannot repair"),
        ("stop", ["it holds nan"], 0, "it holds nan, which skipping"),
        ("rollback", ["it holds nan"], 1, "it holds nan, in the newest checkpoint as well"),
    ],
)
def test_a_weight_that_is_dead_is_not_skipped(policy, dead, rollbacks, words):
    watched = Watched(on_nonfinite=policy, dead=dead)
    with pytest.raises(NumericsError, match=words):
        watched.step(1, {"loss/total": torch.nan})
    assert watched.rollbacks == rollbacks


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_spikes_have_a_rule_of_their_own(policy):
    watched = Watched(sigma=4.0, on_spike=policy)
    for update, norm in enumerate((1.0, 1.1), start=1):
        assert watched.step(update, {"policy/grad_norm": norm})
    spike = {"policy/grad_norm": 50.0}
    offender = BadValue("the gradient norm", 49.0, 3)
    if policy == "stop":
        with pytest.raises(NumericsError, match=r"update 3: policy/grad_norm is 50, .*ppo\.on_spike=skip"):
            watched.step(3, spike, offender=offender)
    else:
        assert not watched.step(3, spike, offender=offender)
        assert not watched.step(4, spike, offender=offender)  # it has not become ordinary
        assert watched.rollbacks == (2 if policy == "rollback" else 0)
    incident = watched.incidents[0]
    assert (incident.kind, incident.consequence, incident.row) == ("spike", policy, 3)
    assert incident.figures["policy/grad_norm"] == 50.0


@pytest.mark.parametrize(
    ("figures", "apart"),
    [
        ({"policy/ratio_max": 1.009}, False),
        ({"policy/ratio_max": 1.011}, True),
        ({"policy/ratio_min": 0.991}, False),
        ({"policy/ratio_min": 0.989}, True),
        ({"policy/ratio_min": 1e-9}, True),
    ],
)
def test_a_first_step_away_from_ratio_one_is_doubted_once(figures, apart):
    watched = Watched()
    for update in (1, 2):
        assert watched.step(update, figures)
    assert len(watched.warnings) == len(watched.incidents) == apart
    if apart:
        assert "sampler and trainer disagree" in watched.warnings[0]
        with pytest.raises(NumericsError, match="sampler and trainer disagree"):
            Watched(strict=True).step(1, figures)
    assert Watched(strict=True, max_ratio=1e9).step(1, figures)


def test_later_steps_may_move_away():
    watched = Watched(strict=True)
    with watched.guard.watching(1, num_passes=4, num_minibatches=2):
        assert watched.guard.allows(0, FINE, pytest.fail)
        assert watched.guard.allows(1, {**FINE, "policy/ratio_max": 3.0, "policy/ratio_min": 0.2}, pytest.fail)


def test_ratios_to_a_sampler_are_only_compared_where_its_weights_are_the_trainers(experience):
    stale, logprobs = torch.zeros_like(experience.rollout.group), experience.rollout.logprobs
    told = replace(experience, old_logprobs=logprobs, recomputed_logprobs=experience.old_logprobs)
    watched, far = Watched(), {**FINE, "policy/ratio_max": 3.0}
    for update in (2, 1):
        assert watched.incidents == []
        with watched.guard.watching(update, num_passes=4, num_minibatches=2):
            watched.guard.check_experience(replace(told, rollout=replace(told.rollout, policy_version=stale)))
            assert watched.guard.allows(0, far, pytest.fail)
    assert [incident.kind for incident in watched.incidents] == ["mismatch"]


@pytest.mark.parametrize("shift", [0.5, -0.5, 900.0])
def test_a_token_that_sampler_and_trainer_see_differently_is_named(experience, shift):
    watched = Watched()
    logprobs = experience.rollout.logprobs.clone()
    logprobs[4, 3] += shift
    told = replace(experience, rollout=replace(experience.rollout, logprobs=logprobs))
    for update in (1, 2):
        with watched.guard.watching(update, num_passes=4, num_minibatches=2):
            watched.guard.check_experience(told)
    [incident] = watched.incidents
    assert (incident.kind, incident.row, incident.token, incident.consequence) == ("mismatch", 4, 3, "warn")
    if abs(shift) == 0.5:
        assert "have the ratio 1.649, rounding explains at most 1.01" in incident.what  # e^0.5


def test_a_little_disagreement_about_every_token_is_a_mismatch_too(experience):
    """As of a sampler that missed one small update: every ratio is e^0.005, and k3 = e^d − 1 − d with d = 0.005."""
    logprobs = torch.where(experience.action_mask, experience.old_logprobs - 0.005, 0.0)
    told = replace(experience, rollout=replace(experience.rollout, logprobs=logprobs))
    quiet, watched = Watched(), Watched(max_k3=1e-6)
    for each in (quiet, watched):
        with each.guard.watching(1, num_passes=4, num_minibatches=2):
            each.guard.check_experience(told)
    assert quiet.incidents == []
    [incident] = watched.incidents
    assert incident.kind == "mismatch"
    assert "(k3 is 1.25e-05 nats per token, at most 1e-06 by rounding)" in incident.what  # 0.005²/2


def test_without_a_guard_a_step_that_is_not_finite_raises():
    assert refuse_nonfinite(0, FINE, pytest.fail)
    with pytest.raises(NumericsError, match=r"value/loss is inf; .*of response 1 is inf; the step was not taken"):
        refuse_nonfinite(0, {**FINE, "value/loss": torch.inf}, lambda: BadValue("the critic's value", torch.inf, 1))
