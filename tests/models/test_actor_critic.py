"""The index contract of the one forward pass, against loops over unpadded rows."""

from dataclasses import replace

import pytest
import torch

from kedge.algorithm.experience import Rollout
from kedge.models import ActorCritic, LanguageModel, ScalarModel, TokenRows, response_logprobs
from tests.models.test_language import padded
from tests.tiny import FAMILIES, tiny_causal_lm, tiny_reward_model, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8], [20, 21], [30]]
RESPONSES = [[9, 10, 2], [22, 23, 24, 25, 26], [31]]  # stopped by EOS, cut at full length, EOS missing early
TEMPERATURE = 0.7


def make_rollout(*, width=5, prompt_width=4, fill=0):
    prompt_ids, prompt_mask = padded(PROMPTS, prompt_width, left=True, fill=fill)
    response_ids, mask = padded(RESPONSES, width, left=False, fill=fill)
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(3, width),
        stopped=torch.tensor([True, False, False]),
        group=torch.arange(3),
        policy_version=torch.zeros(3, dtype=torch.long),
    )


def make_actor_critic(family, critic):
    tokenizer = tiny_tokenizer()
    policy = LanguageModel(tiny_causal_lm(family), tokenizer, value_head=critic == "shared")
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    return ActorCritic(policy, ScalarModel(tiny_reward_model(family), tokenizer) if critic == "separate" else None)


def slow_outputs(actor_critic, prompt, response):
    """Log probability, entropy and value of each response token, from one unpadded pass per token."""
    rows = []
    for position, token in enumerate(response):
        ids = torch.tensor([[*prompt, *response[:position]]])
        logits = actor_critic.policy.causal(input_ids=ids).logits[0, -1].double()
        logits[0] = -torch.inf  # the pad token
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        entropy = -sum(p * lp for p, lp in zip(logprobs.exp().tolist(), logprobs.tolist(), strict=True) if p > 0)
        if actor_critic.critic is None:
            hidden = actor_critic.policy.causal.base_model(input_ids=ids).last_hidden_state[0, -1]
            value = hidden @ actor_critic.policy.value_head.weight[0] + actor_critic.policy.value_head.bias[0]
        else:
            value = actor_critic.critic.classifier(input_ids=ids).logits[0, 0]
        rows.append((logprobs[token].item(), entropy, value.item()))
    return rows


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_is_evaluated_at_the_position_before_it(family, critic):
    actor_critic = make_actor_critic(family, critic)
    with torch.no_grad():
        outputs = actor_critic(make_rollout(width=8, prompt_width=6, fill=123), temperature=TEMPERATURE)
        reference = response_logprobs(actor_critic.policy, make_rollout(), temperature=TEMPERATURE)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            for time, expected in enumerate(slow_outputs(actor_critic, prompt, response)):
                actual = (outputs.logprobs[row, time], outputs.entropy[row, time], outputs.values[row, time])
                assert [float(value) for value in actual] == pytest.approx(expected, abs=1e-5)
                assert float(reference[row, time]) == pytest.approx(expected[0], abs=1e-5)
            assert not outputs.logprobs[row, len(response) :].any()
            assert not outputs.values[row, len(response) :].any()


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_what_stands_in_padding_changes_no_output_and_no_gradient(critic):
    results = []
    for fill, width, prompt_width in [(0, 5, 4), (2, 5, 4), (77, 9, 7)]:
        actor_critic = make_actor_critic("llama", critic)
        outputs = actor_critic(make_rollout(width=width, prompt_width=prompt_width, fill=fill), temperature=TEMPERATURE)
        (outputs.logprobs.sum() + outputs.values.square().sum()).backward()
        gradients = [p.grad for p in actor_critic.parameters() if p.grad is not None]
        results.append((outputs.logprobs[:, :5], outputs.values[:, :5], outputs.entropy[:, :5], *gradients))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_the_value_after_the_last_token_is_that_of_the_whole_response():
    actor_critic = make_actor_critic("gpt2", "separate")
    with torch.no_grad():
        outputs = actor_critic(make_rollout(width=5), temperature=1.0, value_after_last=True)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            after = actor_critic.critic.classifier(input_ids=torch.tensor([[*prompt, *response]])).logits[0, 0]
            if len(response) < 5:
                assert float(outputs.values[row, len(response)]) == pytest.approx(float(after), abs=1e-5)
            assert not outputs.values[row, len(response) + 1 :].any()


def test_a_critic_copied_from_the_reward_model_gives_its_score_at_the_end():
    tokenizer = tiny_tokenizer()
    reward = ScalarModel(tiny_reward_model("llama"), tokenizer)
    reward.normalize(mean=0.3)
    rollout = make_rollout()
    actor_critic = ActorCritic(LanguageModel(tiny_causal_lm(), tokenizer), reward)
    with torch.no_grad():
        scores = reward.scores(TokenRows.of([[*p, *r] for p, r in zip(PROMPTS, RESPONSES, strict=True)]))
        values = actor_critic(rollout, temperature=1.0, value_after_last=True).values
    assert float(values[0, 3]) == pytest.approx(float(scores[0]), abs=1e-5)
    assert float(values[2, 1]) == pytest.approx(float(scores[2]), abs=1e-5)


def test_an_actor_has_at_most_one_critic():
    tokenizer = tiny_tokenizer()
    with pytest.raises(AssertionError, match="at most one critic"):
        ActorCritic(
            LanguageModel(tiny_causal_lm(), tokenizer, value_head=True), ScalarModel(tiny_reward_model(), tokenizer)
        )
    alone = ActorCritic(LanguageModel(tiny_causal_lm(), tokenizer))
    assert not alone.has_critic
    assert list(alone.critic_parameters()) == []
    assert alone(make_rollout(), temperature=1.0).values is None


def conversation(family, critic, *, seed=0):
    """Models and a rollout whose responses hold tokens that are read and not chosen: a tool's output, a user's turn.

    C marks a chosen token, r one that is only read, . padding, x a slot in neither mask inside of a row.
    """
    layout = ["CrrCC.", "rCCrrr", "CCrCxC"]
    draw = torch.Generator().manual_seed(seed)
    prompt_ids, prompt_mask = padded(PROMPTS, 5, left=True, fill=77)
    rollout = Rollout(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=torch.randint(3, 250, (3, 6), generator=draw),
        token_mask=torch.tensor([[mark in "Cr" for mark in row] for row in layout]),
        action_mask=torch.tensor([[mark == "C" for mark in row] for row in layout]),
        logprobs=torch.zeros(3, 6),
        stopped=torch.zeros(3, dtype=torch.bool),
        group=torch.arange(3),
        policy_version=torch.zeros(3, dtype=torch.long),
    )
    return make_actor_critic(family, critic), rollout


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_are_only_read_change_what_follows_as_plain_transformers_says(family, critic):
    actor_critic, rollout = conversation(family, critic)
    with torch.no_grad():
        outputs = actor_critic(rollout, temperature=TEMPERATURE)
        reference = response_logprobs(actor_critic.policy, rollout, temperature=TEMPERATURE)
        for row in range(3):
            read = [int(token) for token in rollout.prompt_ids[row][rollout.prompt_mask[row]]]
            for time, token in enumerate(rollout.response_ids[row].tolist()):
                if rollout.action_mask[row, time]:
                    [expected] = slow_outputs(actor_critic, read, [token])
                    actual = (outputs.logprobs[row, time], outputs.entropy[row, time], outputs.values[row, time])
                    assert [float(value) for value in actual] == pytest.approx(expected, abs=1e-5)
                    assert float(reference[row, time]) == pytest.approx(expected[0], abs=1e-5)
                else:
                    assert outputs.logprobs[row, time] == outputs.entropy[row, time] == outputs.values[row, time] == 0
                if rollout.token_mask[row, time]:
                    read.append(token)


def test_a_token_that_is_read_matters_and_one_in_neither_mask_does_not():
    actor_critic, rollout = conversation("llama", "shared")
    other = replace(rollout, response_ids=rollout.response_ids.clone())
    with torch.no_grad():
        before = actor_critic(rollout, temperature=1.0).logprobs
        other.response_ids[0, 1], other.response_ids[2, 4] = 9, 9  # read, and padding inside of a row
        after = actor_critic(other, temperature=1.0).logprobs
    assert torch.equal(before[1:], after[1:])
    assert before[0, 0] == after[0, 0]
    assert (before[0, 3:5] - after[0, 3:5]).abs().min() > 1e-3


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_slot_after_the_last_action_is_evaluated_once_where_actions_have_gaps(critic):
    actor_critic, rollout = conversation("llama", critic)
    with torch.no_grad():
        outputs = actor_critic(rollout, temperature=TEMPERATURE, value_after_last=True)
        only_values = actor_critic.values(rollout, value_after_last=True)
        plain = actor_critic(rollout, temperature=TEMPERATURE)
    after = {0: 5, 1: 3}  # row 2 ends with the tensor: its last action's slot stays its own
    for row, slot in after.items():
        read = [*rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()]
        read += rollout.response_ids[row, :slot][rollout.token_mask[row, :slot]].tolist()
        [(_, _, value)] = slow_outputs(actor_critic, read, [5])
        assert float(outputs.values[row, slot]) == pytest.approx(value, abs=1e-5)
        assert outputs.logprobs[row, slot] == 0
    extra = torch.zeros(3, 6, dtype=torch.bool)
    extra[0, 5], extra[1, 3] = True, True
    torch.testing.assert_close(outputs.values.masked_fill(extra, 0.0), plain.values)
    torch.testing.assert_close(only_values, outputs.values)
