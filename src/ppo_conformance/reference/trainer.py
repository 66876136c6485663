"""The reference trainer: whole updates of the tiny model, written for reading.

    experience ─▶ for each epoch and minibatch: gradient ─▶ clip ─▶ Adam

Tokens and scores are given by the case (see `ppo_conformance.checks.update`), so that nothing is drawn at random.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppo_conformance.oracle.formulas import Formulas, with_gradient
from ppo_conformance.protocol import Array, Mask
from ppo_conformance.reference.model import Ints, Llama, Weights, initial_weights, merged

Case = Mapping[str, Any]
Batch = Mapping[str, Any]


@dataclass
class State:
    """The state that updates change and checkpoints store: weights and Adam's moments by name, and its steps."""

    weights: Weights
    first: Weights
    second: Weights
    steps: int = 0


@dataclass
class Reading:
    """The model's outputs for responses, [responses, slots].

    Slot t is the state before token t; the last slot is the state after the response.
    """

    logits: Array
    values: Array
    backward: Any = field(repr=False)


@dataclass(frozen=True)
class Experience:
    """Quantities that an update fixes before its epochs, per token of the responses."""

    mask: Mask
    old_log_probs: Array
    reference: Array
    values: Array
    advantages: Array
    returns: Array


class Trainer(Formulas):
    """Makes the updates of a case."""

    def update(self, case) -> Weights:
        """Return the weights after all batches of a case."""
        weights = initial_weights(case["model"])
        zeros = {name: np.zeros_like(weight) for name, weight in weights.items()}
        state = State(weights, zeros, copy.deepcopy(zeros))
        for number, batch in enumerate(case["batches"]):
            if number == case["execution"].get("resume_at"):
                state = self.load(case, self.save(state))
            self.learn(state, case, batch)
        return state.weights

    def save(self, state: State) -> dict[str, Any]:
        """A checkpoint."""
        return copy.deepcopy(vars(state))

    def load(self, case, checkpoint: dict[str, Any]) -> State:
        """The state of a checkpoint."""
        return State(**checkpoint)

    def learn(self, state: State, case, batch) -> None:
        """Train on a batch: for each epoch, a step for each minibatch of the given order."""
        experience = self.experience(state.weights, case, batch) if "scores" in batch else None
        for epoch in batch["orders"]:
            for rows in epoch:
                self.step(state, case, batch, experience, rows)

    # --- reading

    def read(self, weights: Weights, case, batch, rows: Sequence[int]) -> Reading:
        """Read the responses of some rows, one text per line, padded on the right; padding is never read."""
        prompts, responses = ([batch[name][row] for row in rows] for name in ("prompts", "responses"))
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        lengths, starts = (np.array(list(map(len, each)))[:, None] for each in (responses, prompts))
        slots = np.arange(1 + padded_width(responses, case["execution"]))
        states = np.arange(len(texts))[:, None], starts - 1 + np.minimum(slots, lengths)
        whole, trained = merged(weights, case["model"])
        model = Llama(whole, case["model"]["heads"])
        hidden, hidden_backward = model.hidden(padded(texts, max(map(len, texts)), 0))
        logits, logits_backward = model.output(hidden[states])
        head = case["model"]["head"]
        values, values_backward = model.output(hidden[states], head) if head else (0 * logits[..., :1], None)

        def backward(logit_gradient: Array, value_gradient: Array) -> Weights:
            gradient = logits_backward(logit_gradient)
            if values_backward:
                gradient = gradient + values_backward(value_gradient[..., None])
            spread = np.zeros_like(hidden)
            np.add.at(spread, states, gradient * (slots <= lengths)[..., None])
            hidden_backward(spread)
            return trained(model.gradients)

        return Reading(logits, values[..., 0], backward)

    def tokens(self, case, batch, rows: Sequence[int]) -> tuple[Ints, Mask]:
        """The responses as a padded array, and which of their tokens the policy chose and is trained on."""
        responses = [batch["responses"][row] for row in rows]
        width = padded_width(responses, case["execution"])
        tokens = padded(responses, width, case["settings"]["pad"])
        mask = np.arange(width) < np.array([[len(each)] for each in responses])
        for place, row in enumerate(rows):
            mask[place, batch.get("tools", {}).get(str(row), [])] = False
            mask[place] &= batch.get("valid", {row: True})[row]
        return tokens, mask

    # --- experience

    def experience(self, weights: Weights, case, batch) -> Experience:
        """Compute log probabilities, rewards, advantages and returns; nothing of it changes during the epochs."""
        settings = case["settings"]
        rows = range(len(batch["responses"]))
        tokens, mask = self.tokens(case, batch, rows)
        reading = self.read(weights, case, batch, rows)
        base = {**case, "model": {**case["model"], "lora": None}}
        reference = self.read(initial_weights(base["model"]), base, batch, rows)
        old, frozen = (np.array(self.log_probs(x.logits[:, :-1], tokens, settings)) for x in (reading, reference))
        values, scores = self.values(reading, settings), np.array(batch["scores"], dtype=float)
        if case["kind"] == "ppo":
            shaping = {**settings, "coef": settings["kl_in_reward"]}
            rewards = counted(self.shaped_rewards(scores, old, frozen, mask, shaping))
            last = self.last_values(values, batch, mask)
            advantages, returns = map(counted, self.gae(rewards, values[:, :-1], mask, last, settings))
        else:
            valid = np.array(batch.get("valid", [True] * len(scores)))
            found = counted(self.group_advantages(scores, self.groups(batch), valid, settings))
            advantages = returns = mask * found[:, None]
        if settings["whiten"]:
            advantages = self.whiten_of_ranks(advantages, mask, case)
        return Experience(mask, old, frozen, values[:, :-1], advantages, returns)

    def values(self, reading: Reading, settings) -> Array:
        """The critic's values."""
        return reading.values

    def last_values(self, values: Array, batch, mask: Mask) -> Array:
        """The value after each response: 0 where the episode ended, the critic's where it was cut off."""
        lengths = [len(response) for response in batch["responses"]]
        return np.where(batch["ended"], 0.0, values[np.arange(len(values)), lengths])

    def groups(self, batch) -> Ints:
        """The number of each response's prompt."""
        return np.array(batch["groups"])

    def whiten_of_ranks(self, advantages: Array, mask: Mask, case) -> Array:
        """Whiten over the responses of all ranks."""
        return counted(self.whiten(advantages, mask, case["settings"]))

    def token_weights(self, mask: Mask, settings) -> Array:
        """The weight of each token's loss in the loss of the minibatch."""

        def of_losses(losses) -> Any:
            return self.aggregate([list(row[counts]) for row, counts in zip(losses, mask, strict=True)], settings)

        return with_gradient(of_losses, np.zeros(mask.shape), mask.shape)[1]

    # --- steps

    def step(self, state: State, case, batch, experience: Experience | None, rows: list[int]) -> None:
        """An optimizer step on the rows of a minibatch."""
        settings = {**case["settings"], **self.parts(case, len(rows))}
        reading = self.read(state.weights, case, batch, rows)
        if case["kind"] == "reward_model":
            slopes = self.reward_model_loss(reading, [len(batch["responses"][row]) for row in rows], settings)
        else:
            tokens, mask = self.tokens(case, batch, rows)
            fixed = experience and [each[rows, : tokens.shape[1]] for each in vars(experience).values()]
            slopes = self.policy_and_value_loss(reading, tokens, mask, fixed, settings)
        self.apply(state, self.clip(self.accumulated(reading, slopes, settings), settings), settings)

    def parts(self, case, number: int) -> dict[str, Any]:
        """The rows of each micro-batch, and its rank: in a correct trainer, they have no effect."""
        unit = 2 if case["kind"] == "reward_model" else 1
        ranks = case["execution"].get("ranks", 1)
        size = unit * case["execution"].get("micro_batch", number)
        parts, owners = list[list[int]](), list[int]()
        for rank in range(ranks):
            share = [row for row in range(number) if row // unit % ranks == rank]
            found = [share[start : start + size] for start in range(0, len(share), size)]
            parts += found
            owners += [rank] * len(found)
        return {"micro_batches": parts, "ranks": owners}

    def policy_and_value_loss(
        self, reading: Reading, tokens: Ints, mask: Mask, fixed: list[Array] | None, settings
    ) -> tuple[Array, Array]:
        """The gradients of the loss with respect to logits and values.

        policy loss + c_v·value loss + β·KL − c_e·entropy of PPO and its relatives; of fine-tuning, −Σ w·log π
        """
        logits, values = reading.logits[:, :-1], self.values(reading, settings)[:, :-1]
        policy, value = np.zeros_like(reading.logits), np.zeros_like(reading.values)
        log_probs, slopes = self.call("log_probs", [logits, tokens], settings)
        weights = self.token_weights(mask, settings)[..., None]
        if fixed is None:
            policy[:, :-1] = -weights * slopes
            return policy, value
        _, old, frozen, old_values, advantages, returns = fixed
        _, gradient = self.call("policy_loss", [log_probs, old, advantages, mask], settings)
        penalty = {**settings, "coef": settings["kl_in_loss"]}
        gradient = gradient + self.call("kl_loss", [log_probs, frozen, mask], penalty)[1]
        entropy = self.call("entropy", [logits], settings)[1]
        policy[:, :-1] = gradient[..., None] * slopes - settings["entropy_coef"] * weights * entropy
        if settings["value_coef"]:
            _, found = self.call("value_loss", [values, old_values, returns, mask], settings)
            value[:, :-1] = settings["value_coef"] * found
        return policy, value

    def reward_model_loss(self, reading: Reading, lengths: list[int], settings) -> tuple[Array, Array]:
        """The same gradients for pairs of a chosen and a rejected response, in turn: scored at their last tokens."""
        place = np.arange(len(lengths)), self.score_slots(np.array(lengths))
        pairs = reading.values[place].reshape(-1, 2)
        _, gradient = self.call("reward_loss", [pairs, np.ones(pairs.shape)], settings)
        value = np.zeros_like(reading.values)
        value[place] = gradient.ravel()
        return np.zeros_like(reading.logits), value

    def score_slots(self, lengths: Ints) -> Ints:
        """The slot in which a reward model reads the score: the state after the last token."""
        return lengths

    def accumulated(self, reading: Reading, slopes: tuple[Array, Array], settings) -> Weights:
        """The gradient of the weights: the sum over micro-batches and ranks, and so over all rows."""
        return reading.backward(*slopes)

    def clip(self, gradient: Weights, settings) -> Weights:
        """Scale the gradient to a norm of at most `max_grad_norm`; 10⁻⁶ is torch's."""
        norm = np.sqrt(sum((each**2).sum() for each in gradient.values()))
        scale = min(1.0, settings["max_grad_norm"] / (norm + 1e-6))
        return {name: scale * each for name, each in gradient.items()}

    def apply(self, state: State, gradient: Weights, settings) -> None:
        """A step of the optimizer."""
        state.steps += 1
        for name, each in gradient.items():
            moments = state.first[name], state.second[name]
            found = self.adam(state.weights[name], each, *moments, state.steps, settings)
            state.weights[name], state.first[name], state.second[name] = found


def padded(texts: Sequence[list[int]], width: int, pad: int) -> Ints:
    """Texts as rows of one width."""
    return np.array([[*text, *[pad] * (width - len(text))] for text in texts])


def padded_width(responses: Sequence[list[int]], execution: Mapping[str, Any]) -> int:
    """The width of tensors with a row per response."""
    return max(execution.get("pad_to", 0), *map(len, responses))


def counted(table) -> Array:
    """A table as an array, with 0 where nothing counts."""
    return np.nan_to_num(np.array(table, dtype=float))
