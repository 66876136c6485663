"""PPO for language models as the papers have it: loops over single tokens, in float64, on plain transformers models.

Nothing of kedge is imported. Models are read one row at a time, without padding; no formula is rearranged for speed.
What is drawn at random (tokens, order of the minibatches) and a new critic head are given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression, pstdev, stdev
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.999)
NEVER = -1e6
"""A finite logit whose probability is 0, so that 0·log 0 is 0."""
WHITENS = {
    **{"gae": True, "total": True, "to_go": True, "reinforce++": True, "reinforce++_critic": True, "spo": True},
    **{"rloo": False, "grpo": False, "dr_grpo": False, "gigpo": False},
}
"""The estimators that `experience` has, and whether their papers normalize advantages over the batch."""

COMPARED = ("rloo", "grpo", "dr_grpo", "gigpo")
"""The estimators that `compare` has."""


Text = tuple[list[int], list[int]]
"""The token ids of a prompt and of the response to it."""


@dataclass
class Row:
    """A response; `group` is the number of its prompt, `raw_score` what it scores before any penalty."""

    prompt: list[int]
    response: list[int]
    stopped: bool
    group: int
    raw_score: float


@dataclass
class Token:
    """All that an update freezes about a token, or about the slot after a response's last one.

    A step has a reward, a value and a target: every token, or the first of a turn that is one action.
    """

    is_action: bool = True
    is_step: bool = True
    old: float = 0.0
    ref: float = 0.0
    value: float = 0.0
    reward: float = 0.0
    advantage: float = 0.0
    target: float = 0.0


@dataclass
class Report:
    """What an update is compared by, beside the weights: what it trains on, figures of that, and of each step."""

    trained: list[Text] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)


class SlowPpo:
    """A run's weights, Adam's moments and coefficients; `update` is one update.

    Args:
        use: The settings by name: fields of `ppo` and of `rollout`.
        policy: Trained; float64.
        reference: Frozen.
        pad_id: Never sampled.
        stop_ids: The tokens that end a response.
        head: The value head on the policy's trunk, if the critic is shared.
        critic: A sequence classifier with one label, if the critic is separate.
        new_head: The head of either that starts from nothing, and so has a learning rate of its own.
        scorer: A reward model; without one, `score` scores.
        score: A reward function of a response's ids.
    """

    def __init__(
        self,
        use: Mapping[str, Any],
        policy: Any,
        reference: Any,
        *,
        pad_id: int,
        stop_ids: Sequence[int],
        score: Callable[[list[int]], float],
        head: nn.Linear | None = None,
        critic: Any = None,
        new_head: nn.Linear | None = None,
        scorer: Any = None,
    ) -> None:
        self.use, self.pad_id, self.stop_ids, self.score = SimpleNamespace(**use), pad_id, stop_ids, score
        self.policy, self.reference, self.head, self.critic, self.scorer = policy, reference, head, critic, scorer
        self.moments: dict[nn.Parameter, list[Any]] = {}
        self.kl_coef, self.missing_eos = self.use.kl_coef, self.use.missing_eos_score
        self.policy_updates = 0
        self.past: list[Any] = []
        """The policy at the start of each update."""
        self.seen: list[list[tuple[list[int], float]]] = []
        """The prompts and scores of each update before."""
        self.new = set() if new_head is None else set(new_head.parameters())
        layer = head if critic is None else critic.score
        self.layer = set() if layer is None else set(layer.parameters())
        self.offset = 0.0
        """Added to a separate critic's outputs, whose layer has no bias."""
        self.reads_out = self.use.critic == "readout"
        self.is_started = self.use.value_unit == "score"
        self.examples: list[tuple[int, int, Tensor, float]] = []
        """What a read-out is fitted to: an update, the half of its prompts, a state of the policy, and its return."""
        self.expected_tokens: float | None = None
        """Tokens that a step trains on in expectation, if it chooses a share of its responses at random."""

    # --- the models, one row at a time

    def read(self, model: Any, row: Row) -> Tensor:
        """Log probability of every token of the vocabulary, at each token of the response: [tokens, vocabulary]."""
        ids = torch.tensor([row.prompt + row.response])
        logits = model(ids).logits[0, len(row.prompt) - 1 : -1] / self.use.temperature
        allowed = torch.arange(logits.shape[1]) != self.pad_id
        return torch.where(allowed, logits, NEVER).log_softmax(-1)

    def logprobs(self, model: Any, row: Row) -> Tensor:
        return torch.stack([line[token] for line, token in zip(self.read(model, row), row.response, strict=True)])

    def values(self, row: Row) -> Tensor:
        """The value of the state before each token, and of the one after the last."""
        ids = torch.tensor([row.prompt + row.response])
        if self.critic is not None:
            states = self.critic.model(ids).last_hidden_state[0, len(row.prompt) - 1 :]
            return self.critic.score(states)[:, 0] + self.offset
        assert self.head is not None
        return self.head(self.policy.model(ids).last_hidden_state[0, len(row.prompt) - 1 :])[:, 0]

    def read_states(self, update: int, rows: Sequence[Row], table: Sequence[Sequence[Token]]) -> None:
        """Keep the states of rows, as the first epoch sees them, and their returns."""
        for row, tokens in zip(rows, table, strict=True):
            states = self.policy.model(torch.tensor([row.prompt + row.response])).last_hidden_state
            of_row = states[0, len(row.prompt) - 1 :].detach()
            found = zip(of_row, tokens, strict=False)
            self.examples += [(update, row.group % 2, state, token.target) for state, token in found if token.is_step]

    def fit_readout(self, update: int) -> None:
        """Ridge regression, with the penalty by which each half of the prompts predicts the other best (POISE)."""
        decay = (self.use.readout_batches - 1) / (self.use.readout_batches + 1)
        weights = torch.tensor([decay ** (update - each[0]) for each in self.examples]).double()
        half = torch.tensor([each[1] for each in self.examples])
        x = torch.stack([each[2] for each in self.examples])
        y = torch.tensor([each[3] for each in self.examples]).double()

        def moments(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            share = weights[chosen] / weights[chosen].sum()
            mean, center = share @ x[chosen], share @ y[chosen]
            apart = x[chosen] - mean
            return apart.T @ (share[:, None] * apart), apart.T @ (share * (y[chosen] - center)), mean, center

        def solved(chosen: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
            covariance, cross, mean, center = moments(chosen)
            w = torch.linalg.solve(covariance + penalty * torch.eye(len(mean)).double(), cross)
            return w, center - mean @ w

        def error(penalty: float) -> float:
            """Of each half, as the other predicts it."""
            total = 0.0
            for part in (half == 0, half == 1):
                w, b = solved(~part, penalty)
                total += float(weights[part] @ (y[part] - x[part] @ w - b).square())
            return total

        everything = torch.ones(len(y), dtype=torch.bool)
        scale = float(moments(everything)[0].diagonal().mean())
        w, b = solved(everything, min((10.0**power * scale for power in range(-7, 2)), key=error))
        assert self.head is not None
        self.head.weight.copy_(w[None])
        self.head.bias.copy_(b[None])

    @property
    def has_critic(self) -> bool:
        return self.head is not None or self.critic is not None

    def weights(self) -> dict[str, Tensor]:
        """All trained weights, by the names that a run gives them."""
        parts = {"policy.causal": self.policy, "policy.value_head": self.head, "critic.classifier": self.critic}
        named = {
            f"{part}.{name}": weight
            for part, model in parts.items()
            if model
            for name, weight in model.named_parameters()
        }
        return {name: weight.detach() for name, weight in named.items()}

    # --- the experience

    @torch.no_grad()
    def rows(self, sampled: Sequence[Text]) -> list[Row]:
        """All responses, with what they score before any penalty."""
        found: list[Row] = []
        for number, (prompt, response) in enumerate(sampled):
            if self.scorer is None:
                raw = self.score(response)
            else:
                raw = float(self.scorer(torch.tensor([prompt + response])).logits[0, 0])
            group = number // self.use.num_responses
            found.append(Row(prompt, response, response[-1] in self.stop_ids, group, raw))
        return found

    def to_train_on(self, rows: list[Row]) -> list[Row]:
        """Those of the first prompts with two different scores: DAPO, eq. 11."""
        kept: list[Row] = []
        for group in range(len(rows) // self.use.num_responses):
            members = [row for row in rows if row.group == group]
            has_room = len(kept) < self.use.num_prompts * self.use.num_responses
            if has_room and len({row.raw_score for row in members}) > 1:
                kept += members
        return kept

    def scores(self, rows: Sequence[Row]) -> list[float]:
        """N+, detail 16: a response without a stop token gets a fixed score."""
        scores, value = [row.raw_score for row in rows], self.missing_eos
        if value == "auto" and self.scorer is None:
            value = None
        elif value == "auto":
            ended = [score for score, row in zip(scores, rows, strict=True) if row.stopped]
            value = min(-1.0, fmean(ended or scores) - pstdev(scores))
        self.missing_eos = value
        if value is None:
            return scores
        return [score if row.stopped else value for score, row in zip(scores, rows, strict=True)]

    def penalty(self, old: float, ref: float, estimator: str) -> float:
        away = ref - old
        return {"k1": -away, "k2": away**2 / 2, "k3": math.exp(away) - away - 1}[estimator]

    @torch.no_grad()
    def experience(self, rows: Sequence[Row], report: Report) -> list[list[Token]]:
        use = self.use
        scores, table = self.scores(rows), []
        for row, score in zip(rows, scores, strict=True):
            behind = use.max_staleness if use.old_logprobs == "sampler" else 0
            old_policy = self.past[max(0, len(self.past) - 1 - behind)]
            old, ref = (self.logprobs(model, row).tolist() for model in (old_policy, self.reference))
            tokens = [Token(old=each, ref=other) for each, other in zip(old, ref, strict=True)]
            if use.score_at == "after_last" and len(tokens) < use.max_new_tokens:
                tokens.append(Token(is_action=False))
            if self.has_critic:
                for token, value in zip(tokens, self.values(row).tolist(), strict=False):
                    token.value = value
            if use.kl_in != "loss":
                for token in tokens:
                    token.reward = (
                        -self.kl_coef * self.penalty(token.old, token.ref, use.kl_estimator) * token.is_action
                    )
            if use.kl_in == "score":
                charged = sum(token.reward for token in tokens)
                for token in tokens:
                    token.reward = 0.0
                tokens[-1].reward = charged
            tokens[-1].reward += score
            table.append(tokens)
        slots = [token for tokens in table for token in tokens]
        actions = [token for token in slots if token.is_action]
        if use.whiten_rewards:
            mean, std = fmean(token.reward for token in slots), pstdev([token.reward for token in slots])
            for token in slots:
                token.reward = (token.reward - mean) / std + mean
        if use.credit == "turn":
            for tokens in table:
                self.make_one_action(tokens)
        steps = [[token for token in tokens if token.is_step] for tokens in table]
        slots = [token for tokens in steps for token in tokens]
        if self.has_critic and not self.is_started:
            self.start(steps)
        for tokens, of_row in zip(table, steps, strict=True):
            self.estimate(of_row)
            if use.credit == "turn":
                for token in tokens:
                    token.advantage = tokens[0].advantage if token.is_action else token.advantage
        if use.advantage in COMPARED:
            self.compare(rows, table)
        if use.advantage == "reinforce++_critic":
            self.add_critic(table)
        if use.advantage == "spo":
            for row, tokens in zip(rows, table, strict=True):
                total, before = tokens[0].advantage, self.earlier(row.prompt)
                for token in tokens:
                    token.advantage = total - before
            self.seen.append([(row.prompt, score) for row, score in zip(rows, scores, strict=True)])
        if WHITENS[use.advantage] if use.whiten_advantages == "auto" else use.whiten_advantages:
            mean, std = fmean(token.advantage for token in actions), pstdev([token.advantage for token in actions])
            for token in actions:
                token.advantage = (token.advantage - mean) / std
        report.figures |= {
            "reward/total": fmean(sum(token.reward for token in tokens) for tokens in table),
            "objective/kl_coef": self.kl_coef,
        }
        if self.use.kl_coef:
            report.figures["objective/kl"] = sum(token.old - token.ref for token in actions) / len(rows)
        if self.has_critic:
            returns, errors = [t.target for t in slots], [t.target - t.value for t in slots]
            report.figures["value/explained_variance"] = 1 - pstdev(errors) ** 2 / pstdev(returns) ** 2
        return table

    def make_one_action(self, tokens: list[Token]) -> None:
        """Turn-PPO: a turn, which a response to a prompt is, has the rewards of all its tokens at the first of them."""
        first, *others = [token for token in tokens if token.is_action]
        for token in others:
            first.reward, token.reward, token.is_step = first.reward + token.reward, 0.0, False

    def start(self, table: list[list[Token]]) -> None:
        """A regression of the returns on the values, with a slope that is not negative; the critic is mapped by it."""
        gamma, totals = self.use.gamma, list[float]()
        for tokens in table:
            for i in range(len(tokens)):
                totals.append(sum(gamma**k * later.reward for k, later in enumerate(tokens[i:])))
        values = [token.value for tokens in table for token in tokens]
        slope = 0.0
        self.is_started = pstdev(totals) > 1e-6 * max(map(abs, totals))
        if not self.is_started:
            slope = 1.0
        elif pstdev(values) > 1e-6 * math.sqrt(fmean(value**2 for value in values)):
            slope = max(0.0, linear_regression(values, totals).slope)
        intercept = fmean(totals) - slope * fmean(values)
        for weight in self.layer:
            weight *= slope
        self.offset *= slope
        if self.head is None:
            self.offset += intercept
        else:
            self.head.bias += intercept
        for token in (token for tokens in table for token in tokens):
            token.value = slope * token.value + intercept

    def estimate(self, tokens: list[Token]) -> None:
        """GAE as a sum over residuals, or the reward to go; both with their targets for the critic."""
        use, number = self.use, len(tokens)
        after = [*[token.value for token in tokens[1:]], 0.0]
        residuals = [t.reward + use.gamma * v - t.value for t, v in zip(tokens, after, strict=True)]
        to_go = [sum(use.gamma**k * tokens[i + k].reward for k in range(number - i)) for i in range(number)]
        if use.advantage not in ("gae", "reinforce++_critic"):
            for token, total in zip(tokens, to_go, strict=True):
                token.advantage = token.target = total
            return
        length = sum(token.is_action for token in tokens)
        lam = use.gae_lambda
        if lam == "length_adaptive" or isinstance(lam, dict):  # VAPO eq. 5
            alpha = lam["length_adaptive"] if isinstance(lam, dict) else 0.05
            lam = min(1.0, max(0.0, 1 - 1 / (alpha * length)))
        of_critic = lam if use.value_gae_lambda is None else use.value_gae_lambda
        for i, token in enumerate(tokens):
            token.advantage, target = (
                sum((use.gamma * each) ** k * residuals[i + k] for k in range(number - i)) for each in (lam, of_critic)
            )
            token.target = target + token.value

    def compare(self, rows: Sequence[Row], table: list[list[Token]]) -> None:
        """A response's score against those of the same prompt: RLOO §2.3, GRPO §4.1.2, Dr. GRPO §3.2; GiGPO eq. 8.

        GiGPO compares them as episodes, and as turns that all begin after the prompt.
        """
        totals = [tokens[0].advantage for tokens in table]
        for i, row in enumerate(rows):
            others = [totals[j] for j, other in enumerate(rows) if other.group == row.group and j != i]
            group = [totals[i], *others]
            found = 0.0
            if max(group) > min(group):
                baseline = fmean(others) if self.use.advantage == "rloo" else fmean(group)
                found = (totals[i] - baseline) / (stdev(group) if self.use.advantage in ("grpo", "gigpo") else 1.0)
            if self.use.advantage == "gigpo":
                found += self.use.step_weight * found
            for token in table[i]:
                token.advantage = found

    def earlier(self, prompt: list[int], decay: float = 0.875) -> float:
        """SPO: the mean of the prompt's earlier scores, whose weights fall by ρ with each later update that has it.

        Before them stand 1/(1 − ρ) scores, the mean of all prompts' up to the prompt's first update.
        """

        def weighted(updates: Sequence[Sequence[float]]) -> tuple[float, float]:
            pairs = [(decay ** (len(updates) - 1 - i), each) for i, scores in enumerate(updates) for each in scores]
            return sum(weight * each for weight, each in pairs), sum(weight for weight, _ in pairs)

        everything = [[score for _, score in update] for update in self.seen]
        own = [[score for text, score in update if text == prompt] for update in self.seen]
        visits = [number for number, scores in enumerate(own) if scores]
        if not visits:
            total, weight = weighted(everything) if everything else (0.0, 1.0)
            return total / weight
        total, weight = weighted(everything[: visits[0] + 1])
        start = decay ** len(visits) / (1 - decay)
        summed, number = weighted([own[number] for number in visits])
        return (start * total / weight + summed) / (start + number)

    def add_critic(self, table: list[list[Token]]) -> None:
        """Leave the score to go, less w times the change of value that GAE takes from it beyond the mean first value.

        Rows 0 and 1 of every four have the w that is fitted on rows 2 and 3, and the reverse; it is 0 unless the w of
        each of those lowers the other's variance, on balance.
        """
        gamma, start = self.use.gamma, fmean(tokens[0].value for tokens in table)
        plain: list[list[float]] = [
            [sum(gamma**k * later.reward for k, later in enumerate(tokens[i:])) for i in range(len(tokens))]
            for tokens in table
        ]
        learned = [
            [x - token.advantage - start for x, token in zip(each, tokens, strict=True)]
            for each, tokens in zip(plain, table, strict=True)
        ]

        def of(series: list[list[float]], *quarters: int) -> list[float]:
            return [x for i, each in enumerate(series) if i % 4 in quarters for x in each]

        def fitted(*quarters: int) -> float:
            changes = of(learned, *quarters)
            slope = linear_regression(changes, of(plain, *quarters)).slope if pstdev(changes) > 1e-9 else 0.0
            return min(1.0, max(0.0, slope))

        def saved(weight: float, quarter: int) -> float:
            x, change = of(plain, quarter), of(learned, quarter)
            left = [one - weight * other for one, other in zip(x, change, strict=True)]
            return len(x) * (pstdev(x) ** 2 - pstdev(left) ** 2)

        weights = [
            fitted(*quarters)
            if saved(fitted(quarters[0]), quarters[1]) + saved(fitted(quarters[1]), quarters[0]) > 0
            else 0.0
            for quarters in ((2, 3), (0, 1))
        ]
        for i, tokens in enumerate(table):
            for token, x, change in zip(tokens, plain[i], learned[i], strict=True):
                token.advantage = x - weights[i % 4 // 2] * change

    # --- the loss of a minibatch

    def mean(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Of one number per token: over all tokens, over each response and then the responses, or by a constant."""
        if self.use.aggregation == "token":
            each = torch.stack([each for row in rows for each in row])
            return each.sum() / (self.expected_tokens or len(each))
        divisors = [len(row) if self.use.aggregation == "sequence" else self.use.max_new_tokens for row in rows]
        return torch.stack([torch.stack(list(row)).sum() / by for row, by in zip(rows, divisors, strict=True)]).mean()

    def surrogate(self, ratio: Tensor, logprob: Tensor, advantage: float) -> tuple[Tensor, bool]:
        """The loss of a token, and whether its gradient is cut."""
        low, kind = 1 - self.use.clip_range, self.use.policy_loss
        high = 1 + (self.use.clip_range if self.use.clip_range_high is None else self.use.clip_range_high)
        if kind == "clipped":
            free, held = -ratio * advantage, -ratio.clamp(low, high) * advantage
            return torch.maximum(free, held), bool(held > free)
        if kind == "cispo":
            weight = min(float(ratio.detach()), high)
            return -weight * advantage * logprob, float(ratio.detach()) > high and advantage != 0
        if kind == "double_sided":
            outside = not low <= float(ratio.detach()) <= high
            return (0 * ratio if outside else -ratio * advantage), outside and advantage != 0
        assert kind == "unclipped"
        return -ratio * advantage, False

    def value_unit(self, table: Sequence[Sequence[Token]]) -> float:
        """Unless it is the score: the returns' standard deviation, at least the critic's RMS error."""
        if self.use.value_unit == "score":
            return 1.0
        table = [[token for token in tokens if token.is_step] for tokens in table]
        returns = [token.target for tokens in table for token in tokens]
        error = math.sqrt(fmean((token.target - token.value) ** 2 for tokens in table for token in tokens))
        size = math.sqrt(fmean(target**2 for target in returns))
        return max(pstdev(returns), error, 1e-4 * size) or 1.0

    def value_term(self, rows: Sequence[Row], table: Sequence[Sequence[Token]], unit: float) -> Tensor:
        """The weighted value loss: N+ line 747, S2 without the half."""
        losses: list[list[Tensor]] = []
        for row, tokens in zip(rows, table, strict=True):
            now = self.values(row)[: len(tokens)] / unit
            losses.append([])
            for value, token in ((value, token) for value, token in zip(now, tokens, strict=True) if token.is_step):
                old, target = token.value / unit, token.target / unit
                loss = (value - target) ** 2
                if (reach := self.use.value_clip_range) is not None:
                    loss = torch.maximum(loss, (value.clamp(old - reach, old + reach) - target) ** 2)
                losses[-1].append(loss if self.use.value_loss == "mse" else loss / 2)
        return self.use.value_coef * self.mean(losses)

    def policy_term(self, rows: Sequence[Row], table: Sequence[Sequence[Token]], figures: dict[str, float]) -> Tensor:
        use, losses, kls, entropies, good, cut, moved = self.use, [], [], [], [], [], []
        for row, tokens in zip(rows, table, strict=True):
            lines, actions = self.read(self.policy, row), [token for token in tokens if token.is_action]
            now = torch.stack([line[token] for line, token in zip(lines, row.response, strict=True)])
            logs = [lp - token.old for lp, token in zip(now, actions, strict=True)]
            ratios = [each.exp() for each in logs]
            losses.append([])
            if use.ratio in ("sequence", "turn"):  # GSPO eq. 7; the response is one turn
                ratios = [torch.stack(logs).mean().exp()] * len(logs)
            for ratio, lp, token in zip(ratios, now, actions, strict=True):
                loss, is_cut = self.surrogate(ratio, lp, token.advantage)
                losses[-1].append(loss)
                cut.append(float(is_cut))
            moved += [float((each.exp() - 1 - each).detach()) for each in logs]
            entropies.append([-(line.exp() * line).sum() for line in lines])
            if use.kl_in == "loss":
                away = [token.ref - lp for lp, token in zip(now, actions, strict=True)]
                k3 = use.kl_estimator == "k3"
                kls.append([each.exp() - 1 - each if k3 else each**2 / 2 for each in away])
            if row.raw_score >= 1:
                good += list(now)
        total = self.mean(losses)
        figures |= {
            "policy/loss": float(total.detach()),
            "policy/clip_fraction": sum(cut),
            "policy/approx_kl": sum(moved),
            "policy/entropy": sum(float(each.detach()) for row in entropies for each in row),
        }
        tokens = self.expected_tokens or len(cut)
        for name in ("policy/clip_fraction", "policy/approx_kl", "policy/entropy"):
            figures[name] /= tokens
        if use.entropy_coef:
            total = total - use.entropy_coef * self.mean(entropies)
        if use.kl_in == "loss":
            total = total + self.kl_coef * self.mean(kls)
        if use.positive_nll_coef and good:  # VAPO eq. 9
            total = total - use.positive_nll_coef * torch.stack(good).mean()
        return total

    # --- the step

    def parameters(self, *, of_critic: bool) -> list[nn.Parameter]:
        """A critic that shares no gradient with the policy is clipped apart from it."""
        if of_critic:
            return [] if self.critic is None else [each for each in self.critic.parameters() if each.requires_grad]
        return [*self.policy.parameters(), *([] if self.head is None or self.reads_out else self.head.parameters())]

    def step(
        self,
        loss: Tensor,
        rates: tuple[float, float],
        names: tuple[str, str],
        only: set[nn.Parameter] | None,
        unit: float,
    ) -> dict[str, float]:
        """Clip the gradients and take Adam's step; return the norms before. TensorFlow adds ε before debiasing v.

        The critic's output layer w is trained as w/u in the unit u: ∂L/∂(w/u) = u·∂L/∂w.
        """
        use, norms = self.use, {}
        for parameters, rate, name in zip(
            (self.parameters(of_critic=False), self.parameters(of_critic=True)), rates, names, strict=True
        ):
            trained = [each for each in parameters if only is None or each in only]
            if not trained:
                continue
            gradients = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
            if all(each is None for each in gradients):
                continue
            gradients = [
                unit * each if weight in self.layer and each is not None else each
                for weight, each in zip(trained, gradients, strict=True)
            ]
            norms[name] = norm = math.sqrt(sum(float((each**2).sum()) for each in gradients if each is not None))
            scale = use.max_grad_norm / norm if use.max_grad_norm and norm > use.max_grad_norm else 1.0
            for weight, gradient in zip(trained, gradients, strict=True):
                if gradient is None:
                    continue
                lr, g = rate * (use.value_head_rate if weight in self.new else 1.0), gradient * scale
                state = self.moments.setdefault(weight, [0, torch.zeros_like(g), torch.zeros_like(g)])
                state[0] += 1
                state[1] = BETAS[0] * state[1] + (1 - BETAS[0]) * g
                state[2] = BETAS[1] * state[2] + (1 - BETAS[1]) * g**2
                first, second = 1 - BETAS[0] ** state[0], 1 - BETAS[1] ** state[0]
                if use.adam_eps_mode == "tf1":
                    move = state[1] * math.sqrt(second) / first / (state[2].sqrt() + use.adam_eps)
                else:
                    move = state[1] / first / ((state[2] / second).sqrt() + use.adam_eps)
                with torch.no_grad():
                    if weight.ndim >= 2:
                        weight -= lr * use.weight_decay * weight
                    weight -= lr * move * (unit if weight in self.layer else 1.0)
        return norms

    def rate(self, update: int, peak: float) -> float:
        use, warmup = self.use, self.use.value_warmup_updates
        total = use.num_updates - warmup
        is_policy = update > warmup
        done = update - 1 - (warmup if is_policy else 0)
        rise = round(use.warmup_fraction * total)
        if done < rise:
            return peak * (done + 1) / (rise + 1)
        if use.schedule == "constant" or not is_policy:
            return peak
        assert use.schedule == "linear"
        return peak * (1 - (done - rise) / (total - rise))

    def update(
        self,
        update: int,
        sampled: Sequence[Text],
        orders: Sequence[Sequence[Sequence[int]]],
        choices: Sequence[Sequence[int]] = (),
    ) -> Report:
        """PPO, algorithm 1.

        Args:
            update: Its number, from 1.
            sampled: The responses, prompt by prompt.
            orders: The minibatches of each pass: the policy's, then any further ones of the critic, epoch by epoch.
            choices: The places in each minibatch of the responses that are trained on, if not all of them are.
        """
        self.past.append(copy.deepcopy(self.policy))
        use, passes, is_warmup = self.use, list(orders), update <= self.use.value_warmup_updates
        rows, report = self.rows(sampled), Report()
        report.figures = {
            "reward/score_mean": fmean(self.scores(rows)),
            "response/length": fmean(len(row.response) for row in rows),
            "response/eos_rate": fmean(float(row.stopped) for row in rows),
        }
        if use.constant_groups != "keep" and not is_warmup:
            rows = self.to_train_on(rows)
        report.trained = [(row.prompt, row.response) for row in rows]
        peaks = (use.learning_rate, use.critic_learning_rate or use.learning_rate)
        rates = (self.rate(update, peaks[0]), self.rate(update, peaks[1]))
        table = self.experience(rows, report)
        unit = self.value_unit(table)
        critics = set(self.parameters(of_critic=True)) or set(() if self.head is None else self.head.parameters())
        for order in passes:
            assert sorted(i for part in order for i in part) == list(range(len(rows)))
            assert max(map(len, order)) - min(map(len, order)) <= 1
        for epoch in range(math.ceil(use.num_epochs)):
            for number, part in enumerate(passes.pop(0)):
                if choices:
                    tokens = sum(len(rows[i].response) for i in part)
                    self.expected_tokens = tokens * len(choices[number]) / len(part)
                    part = [part[place] for place in choices[number]]
                chosen, frozen = [rows[i] for i in part], [table[i] for i in part]
                if self.reads_out and epoch == 0:
                    self.read_states(update, chosen, frozen)
                figures: dict[str, float] = {}
                policy = self.policy_term(chosen, frozen, figures)
                loss = torch.zeros(()) if is_warmup else policy
                if self.has_critic and not self.reads_out:
                    value = self.value_term(chosen, frozen, unit)
                    loss = loss + value
                    weight = use.value_coef * (2.0 if use.value_loss == "mse" else 1.0)  # the metric is always halved
                    figures["value/loss"] = float(value.detach()) / weight
                figures["loss/total"] = float(loss.detach())
                figures |= self.step(
                    loss, rates, ("policy/grad_norm", "value/grad_norm"), critics if is_warmup else None, unit
                )
                report.steps.append(figures)
            for _ in range(use.num_critic_epochs - 1):
                for part in passes.pop(0):
                    value = self.value_term([rows[i] for i in part], [table[i] for i in part], unit)
                    self.step(value, rates, ("value/grad_norm", "value/grad_norm"), critics, unit)
        assert not passes, "every pass that was made is one of the algorithm's"
        if self.reads_out:
            with torch.no_grad():
                self.fit_readout(update)
        if not is_warmup:
            self.adapt(report.figures.get("objective/kl", 0.0), len(rows))
        return report

    def adapt(self, kl: float, number: int) -> None:
        """Ziegler §2.2."""
        use = self.use
        self.policy_updates += 1
        if not isinstance(use.kl_controller, dict):
            return
        control = use.kl_controller["ziegler"]
        if self.policy_updates > control["wait"] * (use.num_updates - use.value_warmup_updates):
            error = min(max(max(kl, 0.0) / control["target"] - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * number / control["horizon"]
