# %% [markdown]
# # One token through an update
#
# PPO trains a language model on responses that the model wrote itself and that something else scored. This notebook
# follows a single token of one response through one update, from the draw to the token's new probability. It computes
# every number twice: with the function that kedge's training loop calls (`kedge.algorithm`), and by hand, with
# nothing but `math`. Each line that prints two numbers also asserts that they agree.
#
# You need PyTorch, and no knowledge of PPO. [One token's way through PPO](../../docs/token.md) tells the same story
# with a real policy, a reward model and pictures.

# %%
import math
import random

import matplotlib.pyplot as plt
import torch

from kedge.algorithm import (
    clipped_policy_loss,
    clipped_value_loss,
    generalized_advantages,
    kl_estimate,
    masked_whiten,
    shape_rewards,
    token_logprobs,
)

torch.set_default_dtype(torch.float64)  # so that both computations agree to many digits


def same(name, by_kedge, by_hand):
    """Print a number that was computed twice, and check that it is the same number."""
    by_kedge = float(by_kedge.detach())
    assert math.isclose(by_kedge, by_hand, rel_tol=1e-9, abs_tol=1e-12), (name, by_kedge, by_hand)
    print(f"{name:40} kedge {by_kedge:9.6f}   by hand {by_hand:9.6f}")


# %% [markdown]
# ## A language model of seven words
#
# A language model maps a text to logits for the next token. Ours looks at the last word only, so that the whole model
# is a table: row = last word, column = next word. A transformer computes its row of logits from the whole text, and
# everything below stays the same.
#
# Three of PPO's four models are such tables here:
#
# - the **policy**, which is trained, after some updates already,
# - the **reference**, a frozen copy of the policy before PPO,
# - the **critic**, which predicts how much reward is still to come: one number for each last word.
#
# The fourth, the reward model, is a function: it likes milk.

# %%
WORDS = ["drink", "tea", "coffee", "with", "milk", "sugar", "."]
DRINK, TEA, COFFEE, WITH, MILK, SUGAR, END = range(7)

reference = torch.tensor([
    # drink  tea  coffee with  milk sugar  .
    [-4.0, 0.5, 1.0, -3.0, 0.0, -3.0, -3.0],  # after "drink"
    [-4.0, -4.0, -3.0, 1.0, -1.0, -2.0, 0.8],  # after "tea"
    [-4.0, -3.0, -4.0, 1.2, -1.0, -2.0, 0.6],  # after "coffee"
    [-4.0, -2.0, -2.0, -4.0, 0.3, 0.8, -3.0],  # after "with"
    [-4.0, -3.0, -3.0, -1.0, -4.0, -1.0, 2.0],  # after "milk"
    [-4.0, -3.0, -3.0, -1.0, -0.5, -4.0, 2.0],  # after "sugar"
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # after the end: never used
])  # fmt: skip
policy = reference.clone()
policy[DRINK, TEA] += 0.3  # what earlier updates have changed
policy[WITH, MILK] += 0.4
policy.requires_grad_()

values_after = torch.tensor([0.35, 0.40, 0.30, 0.45, 0.90, 0.10, 0.0])  # the critic's table


def reward_model(words):
    """Score a whole response."""
    return 1.0 if "milk" in words else 0.0


# %% [markdown]
# ## 1. The policy samples
#
# The prompt is `I drink`. The policy draws one word after another until it draws the end. We take four responses;
# real runs take hundreds.

# %%
draws = random.Random(4)


def sample(last=DRINK):
    """Draw words until the end."""
    response = []
    while last != END:
        [last] = draws.choices(range(len(WORDS)), weights=policy[last].softmax(-1).tolist())
        response.append(last)
    return response


responses = [sample() for _ in range(4)]
for response in responses:
    print("I drink", " ".join(WORDS[token] for token in response))

# %% [markdown]
# Responses have different lengths, so they are padded to a rectangle, with a mask that is True where a token counts.
# From here on, tensors are `[response, time]`. The token that we follow is the first word of the first response.

# %%
longest = max(map(len, responses))
tokens = torch.tensor([response + [END] * (longest - len(response)) for response in responses])
mask = torch.tensor([[time < len(response) for time in range(longest)] for response in responses])
last_words = torch.cat([torch.full((len(responses), 1), DRINK), tokens[:, :-1]], dim=1)  # what the model has read

ROW, TIME = 0, 0  # the token that we follow
token = responses[ROW][TIME]
print("we follow", repr(WORDS[token]))

# %% [markdown]
# The probability of a word is the softmax of its row of logits. What PPO keeps is its logarithm, in nats: log
# probabilities of a text add up, and ratios become differences.


# %%
def softmax(logits):
    """The probabilities of a row of logits, by hand."""
    exponentials = [math.exp(each) for each in logits]
    return [each / sum(exponentials) for each in exponentials]


with torch.no_grad():
    old_logprobs = token_logprobs(policy[last_words], tokens)
    ref_logprobs = token_logprobs(reference[last_words], tokens)

old_row = policy[DRINK].tolist()  # the logits of the first word, before the update
by_hand_old = math.log(softmax(old_row)[token])
by_hand_ref = math.log(softmax(reference[DRINK].tolist())[token])
same("log probability, policy", old_logprobs[ROW, TIME], by_hand_old)
same("log probability, reference", ref_logprobs[ROW, TIME], by_hand_ref)
print(f"the policy drew {WORDS[token]!r} with probability {math.exp(by_hand_old):.3f}")

# %%
figure, axis = plt.subplots(figsize=(6, 2.4))
places = range(len(WORDS))
axis.bar([place - 0.2 for place in places], softmax(reference[DRINK].tolist()), 0.4, label="reference", color="0.7")
axis.bar([place + 0.2 for place in places], softmax(old_row), 0.4, label="policy", color="tab:blue")
axis.set_xticks(places, WORDS)
axis.set_title("the next word after “I drink”")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 2. The response is scored
#
# A **score** belongs to a whole response. No single word has one, and the model must find out which words earned it.
# The rest of this notebook is about that question.

# %%
scores = torch.tensor([reward_model([WORDS[each] for each in response]) for response in responses])
print("scores", scores.tolist())

# %% [markdown]
# ## 3. Score and KL penalty become rewards
#
# A policy that only maximizes the score ends in texts that the reward model overrates. So each token pays for moving
# away from the reference: β times the sampled KL, the difference of the two log probabilities. It may be negative for
# a single token, but its mean is not. The last token also gets the score:
#
# $$ r_t = -\beta\,(\log \pi(a_t) - \log \pi_{\text{ref}}(a_t)) \;+\; \text{score} \cdot [t = \text{last}] $$

# %%
KL_COEF = 0.1
kl = kl_estimate(old_logprobs, ref_logprobs)
shaped = shape_rewards(scores, old_logprobs, ref_logprobs, mask, kl_coef=KL_COEF)


def rewards_by_hand(row):
    """The reward of each token of a response."""
    rewards, last = [], DRINK
    for each in responses[row]:
        log_policy = math.log(softmax(policy[last].tolist())[each])
        log_reference = math.log(softmax(reference[last].tolist())[each])
        rewards.append(-KL_COEF * (log_policy - log_reference))
        last = each
    rewards[-1] += float(scores[row])
    return rewards


rewards = rewards_by_hand(ROW)
same("KL of our token, nats", kl[ROW, TIME], by_hand_old - by_hand_ref)
same("reward of our token", shaped.rewards[ROW, TIME], rewards[TIME])
same("reward of the last token", shaped.rewards[ROW, len(rewards) - 1], rewards[-1])

# %% [markdown]
# Earlier updates have made our token more likely, so it costs a little. The good news comes at the end of the
# response.
#
# ## 4. The critic predicts
#
# Before each token the critic predicts the sum of the rewards that are still to come: $V_t$. The **TD error** of a
# token is what arrived (its reward, and the prediction after it) minus what had been predicted before it:
#
# $$ \delta_t = r_t + \gamma V_{t+1} - V_t $$
#
# After the last token nothing comes, so $V$ is 0 there. For language, γ is 1: a late reward is worth as much as an
# early one.

# %%
GAMMA, GAE_LAMBDA = 1.0, 0.95
values = values_after[last_words]


def td_errors_by_hand(row):
    """The TD error of each token of a response."""
    predicted = [float(values_after[last]) for last in [DRINK, *responses[row][:-1]]] + [0.0]
    return [reward + GAMMA * predicted[t + 1] - predicted[t] for t, reward in enumerate(rewards_by_hand(row))]


td_errors = td_errors_by_hand(ROW)
only_td = generalized_advantages(shaped.rewards, values, mask, gamma=GAMMA, gae_lambda=0.0)  # λ = 0 leaves the TD error
for time, each in enumerate(responses[ROW]):
    same(f"TD error of {WORDS[each]!r}", only_td.advantages[ROW, time], td_errors[time])

# %% [markdown]
# ## 5. GAE: TD errors become an advantage
#
# Was our token a good choice? Its own TD error trusts the critic completely. The sum of all later rewards does not
# trust it at all, and has the noise of every later draw. Generalized advantage estimation is in between: each later
# TD error counts, less by γλ per step.
#
# $$ A_t = \delta_t + \gamma\lambda\,\delta_{t+1} + (\gamma\lambda)^2\,\delta_{t+2} + \dots $$

# %%
estimated = generalized_advantages(shaped.rewards, values, mask, gamma=GAMMA, gae_lambda=GAE_LAMBDA)


def advantages_by_hand(row):
    """GAE as the sum in the formula."""
    errors = td_errors_by_hand(row)
    return [sum((GAMMA * GAE_LAMBDA) ** k * errors[t + k] for k in range(len(errors) - t)) for t in range(len(errors))]


raw_advantage = advantages_by_hand(ROW)[TIME]
same("advantage of our token", estimated.advantages[ROW, TIME], raw_advantage)

# %%
contributions = [(GAMMA * GAE_LAMBDA) ** (time - TIME) * td_errors[time] for time in range(TIME, len(td_errors))]
figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.4), sharey=True)
names = [WORDS[each] for each in responses[ROW]]
axes[0].bar(range(len(names)), td_errors, color="tab:orange")
axes[0].set_title("TD error of each token")
axes[1].bar(range(len(contributions)), contributions, color="tab:green")
axes[1].set_title(f"part of the advantage of “{names[TIME]}”")
for axis in axes:
    axis.axhline(0, color="0.6", linewidth=0.8)
    axis.set_xticks(range(len(names)), names)
plt.show()

# %% [markdown]
# This is how a score at the end reaches a word at the beginning.
#
# The critic's own target is the **return**: the advantage plus the value, that is, what the value should have been.

# %%
same("return, the critic's target", estimated.returns[ROW, TIME], raw_advantage + float(values_after[DRINK]))

every_error = [
    advantage  # return − value is the advantage again
    for row in range(len(responses))
    for advantage in advantages_by_hand(row)
]
critic_loss = clipped_value_loss(values, values, estimated.returns, mask, clip_range=None).loss
same("loss of the critic, whole batch", critic_loss, 0.5 * sum(each**2 for each in every_error) / len(every_error))

# %% [markdown]
# Last, the advantages of the whole batch are whitened, to mean 0 and variance 1, so that the size of a step does not
# depend on the scale of the scores.

# %%
advantages = masked_whiten(estimated.advantages, mask)

mean = sum(every_error) / len(every_error)
deviation = math.sqrt(sum((each - mean) ** 2 for each in every_error) / len(every_error))
whitened = [[(each - mean) / deviation for each in advantages_by_hand(row)] for row in range(len(responses))]
same("whitened advantage", advantages[ROW, TIME], whitened[ROW][TIME])

# %% [markdown]
# ## 6. The clipped objective
#
# Now the policy is trained on the frozen batch for several epochs. The **ratio** says how far a token's probability
# has moved since it was drawn; it starts at 1:
#
# $$ \rho = \frac{\pi(a)}{\pi_{\text{old}}(a)} = \exp(\log\pi(a) - \log\pi_{\text{old}}(a)) $$
#
# The loss of a token is $-\min(\rho A,\ \text{clip}(\rho,\, 0.8,\, 1.2)\,A)$. A token with a positive advantage gains
# nothing from a ratio above 1.2, so its gradient there is 0: the batch was drawn by the old policy, and says little
# about a policy far from it.
#
# ### The gradient
#
# The derivative of $\log\text{softmax}(z)_a$ with respect to the logits $z$ is $\text{onehot}(a) - \pi$. So a token
# that is not clipped contributes $-\frac{1}{N} A \rho\,(\text{onehot}(a) - \pi)$ to the gradient of its row, with $N$
# tokens in the batch. All four first words share the row of `drink`.

# %%
CLIP = 0.2


def policy_loss():
    """The loss of the whole batch, by kedge."""
    logprobs = token_logprobs(policy[last_words], tokens)
    return clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_range=CLIP).loss


def ratio_by_hand(row_of_logits, word):
    """How far a word's probability has moved."""
    return softmax(row_of_logits)[word] / softmax(old_row)[word]


def gradient_by_hand(row_of_logits):
    """The gradient of the row of `drink`, from all words that follow it."""
    probabilities = softmax(row_of_logits)
    gradient = [0.0] * len(WORDS)
    read_drink = [
        (word, whitened[row][time])
        for row, response in enumerate(responses)
        for time, word in enumerate(response)
        if [DRINK, *response][time] == DRINK
    ]
    for word, advantage in read_drink:
        ratio = ratio_by_hand(row_of_logits, word)
        if (advantage > 0 and ratio > 1 + CLIP) or (advantage < 0 and ratio < 1 - CLIP):
            continue  # clipped
        for place in range(len(WORDS)):
            one_hot = 1.0 if place == word else 0.0
            gradient[place] -= advantage * ratio * (one_hot - probabilities[place]) / len(every_error)
    return gradient


gradient = torch.autograd.grad(policy_loss(), policy)[0]
by_hand = gradient_by_hand(old_row)
for place, word in enumerate(WORDS):
    same(f"gradient of the logit of {word!r}", gradient[DRINK, place], by_hand[place])

# %% [markdown]
# A negative gradient raises a logit. The gradients of a row add up to 0: probability only moves from one word to
# another.
#
# ## 7. Four epochs
#
# Real runs use Adam. Plain gradient descent, with a large step for our large numbers, can be done by hand.

# %%
STEP = 1.0
row_by_hand = old_row
ratios = []
for epoch in range(1, 5):
    loss = policy_loss()
    gradient = torch.autograd.grad(loss, policy)[0]
    by_hand = gradient_by_hand(row_by_hand)
    ratio = ratio_by_hand(row_by_hand, token)
    ratios.append(ratio)
    with torch.no_grad():
        now = token_logprobs(policy[last_words], tokens)[ROW, TIME]
        same(f"epoch {epoch}: ratio", (now - old_logprobs[ROW, TIME]).exp(), ratio)
        advantage = whitened[ROW][TIME]
        objective = min(ratio * advantage, min(max(ratio, 1 - CLIP), 1 + CLIP) * advantage)
        clipped = clipped_policy_loss(
            now.view(1, 1), old_logprobs[:1, :1], advantages[:1, :1], mask[:1, :1], clip_range=CLIP
        )
        same(f"epoch {epoch}: our token's loss", clipped.loss, -objective)
        print(f"epoch {epoch}: {'clipped, no gradient of its own' if clipped.clip_fraction else 'not clipped'}")
        policy -= STEP * gradient
    row_by_hand = [logit - STEP * slope for logit, slope in zip(row_by_hand, by_hand)]

final = softmax(row_by_hand)[token]
ratios.append(final / math.exp(by_hand_old))
same("probability before the update", old_logprobs[ROW, TIME].exp(), math.exp(by_hand_old))
same("probability after the update", policy[DRINK].softmax(-1)[token], final)

# %%
figure, axis = plt.subplots(figsize=(6, 2.6))
line = [0.7 + 0.01 * step for step in range(91)]
axis.plot(line, [min(rho * advantage, min(max(rho, 0.8), 1.2) * advantage) for rho in line], color="0.5")
for number, rho in enumerate(ratios):
    objective = min(rho * advantage, min(max(rho, 0.8), 1.2) * advantage)
    axis.plot(rho, objective, "o", color="tab:blue")
    axis.annotate("start" if number == 0 else str(number), (rho, objective), (0, -14), textcoords="offset points")
axis.set_xlabel("ratio ρ")
axis.set_title("our token's objective, and its ratio after each epoch")
plt.show()

# %% [markdown]
# ## What has happened
#
# One word became more likely, because a response that began with it got a score that the critic had not expected.
# Every step was a few lines of arithmetic:
#
# | step | in | out | in kedge |
# |---|---|---|---|
# | sample | logits | token, log probability | `token_logprobs` |
# | shape | score, KL to the reference | a reward for each token | `shape_rewards` |
# | predict | text so far | value | the critic |
# | estimate | rewards, values | advantages, returns | `generalized_advantages`, `masked_whiten` |
# | improve | ratio, advantage | gradient of the policy | `clipped_policy_loss` |
# | improve | value, return | gradient of the critic | `clipped_value_loss` |
#
# Try: a `KL_COEF` of 2, so that the penalty outweighs the score; `GAE_LAMBDA = 0`, so that the score reaches the last
# word only; a `STEP` of 4, so that the clip acts at once. The next notebook, [A critic that
# learns](a_critic_that_learns.ipynb), trains a real policy and looks at its values.
