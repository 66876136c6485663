"""The trial that finds how many tokens a pass can hold."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge.algorithm.experience import Rollout
from kedge.config import Config
from kedge.models import ActorCritic, LanguageModel
from kedge.models.live_bytes import LiveBytes
from kedge.ranks import ALONE, AdaptiveTokens, tokens_in
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.training import pass_trial
from kedge.training.learner import LanguageLearner
from kedge.training.pass_trial import find_tokens
from tests.stages.ppo.test_ppo import PROMPTS, configure
from tests.stages.test_out_of_memory import metrics_of
from tests.stages.test_resume import len_of, model_bytes
from tests.tiny import save_tiny_policy, tiny_causal_lm, tiny_tokenizer

WIDTH = 64
LENGTHS = [5, 3, 12, 10, 7]


class Passes:
    """A pass keeps 4·64 bytes per token and layer for its gradient, of three layers."""

    def __init__(self) -> None:
        self.weights = [torch.nn.Parameter(torch.full((WIDTH,), 1.1)) for _ in range(3)]
        self.optimizer = torch.optim.AdamW(self.weights)

    def __call__(self, rows: list[int]) -> None:
        self.read(sum(LENGTHS[row] for row in rows))

    def read(self, tokens: int) -> None:
        hidden = torch.rand(tokens, WIDTH)
        for weight in self.weights:
            hidden = (hidden * weight).sin()
        hidden.sum().backward()

    def peak(self, tokens: int) -> int:
        """Bytes that are alive at most in a pass over so many tokens."""
        with LiveBytes() as counter:
            before = counter.hold(self.weights)
            hidden = torch.rand(tokens, WIDTH)
            for weight in self.weights:
                hidden = (hidden * weight).sin()
            hidden.sum().backward()
            return counter.restart() - before


@pytest.mark.parametrize("free", [2**40, 4_000_000, 1_000_000, 300_000, 60_000])
def test_the_number_fits_and_twice_as_many_would_not(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_trial, "free_memory", lambda: free)
    passes, budget = Passes(), AdaptiveTokens(8192)
    torch.manual_seed(0)
    expected = float(torch.rand(()))
    torch.manual_seed(0)
    find_tokens(budget, LENGTHS, passes, passes.optimizer, ranks=ALONE)
    assert float(torch.rand(())) == expected, "the trial draws no numbers of the run"
    assert all(weight.grad is None for weight in passes.weights)
    moments = 8 * 3 * WIDTH
    room = pass_trial.SHARE * (free - moments)
    if budget.tokens > max(LENGTHS):
        assert copy.deepcopy(passes).peak(budget.tokens) <= room * 1.01
    if budget.tokens < 8192 and 2 * budget.tokens > max(LENGTHS):
        assert copy.deepcopy(passes).peak(2 * budget.tokens) > room * 0.99


def test_rows_that_begin_alike_need_no_less_memory_for_each_token_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two longest rows have seven tokens in common; in a pass over both, the second adds three."""
    monkeypatch.setattr(pass_trial, "free_memory", lambda: 1_000_000)
    alone, shared = AdaptiveTokens(8192), AdaptiveTokens(8192)
    passes = Passes()
    find_tokens(alone, LENGTHS, passes, passes.optimizer, ranks=ALONE)
    pieces = [((-1, 7), (row, length - 7)) if length > 7 else ((row, length),) for row, length in enumerate(LENGTHS)]
    read: list[int] = []

    def run_pass(rows: list[int]) -> None:
        read.append(tokens_in(rows, LENGTHS, pieces))
        passes.read(read[-1])

    find_tokens(shared, LENGTHS, run_pass, passes.optimizer, prompts=pieces, ranks=ALONE)
    assert read == [12, 15]
    assert shared.tokens == alone.tokens < 8192


@pytest.mark.parametrize("free", [2_000_000, 3_000_000, 4_000_000])
def test_a_pass_over_many_responses_to_a_prompt_fits(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses need more memory per token than prompts, which all of them attend to."""
    monkeypatch.setattr(pass_trial, "free_memory", lambda: free)
    models = ActorCritic(LanguageModel(tiny_causal_lm(), tiny_tokenizer(), value_head=True))
    mask = torch.ones(64, 8, dtype=torch.bool)
    rollout = Rollout(
        prompt_ids=torch.arange(100, 150).expand(64, -1),
        prompt_mask=torch.ones(64, 50, dtype=torch.bool),
        response_ids=torch.arange(5, 69)[:, None].expand(-1, 8),
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(64, 8),
        stopped=mask[:, 0],
        group=torch.zeros(64, dtype=torch.long),
        policy_version=torch.zeros(64, dtype=torch.long),
    )
    weights = torch.nn.ParameterList(models.parameters())
    budget, optimizer = AdaptiveTokens(512), torch.optim.AdamW(weights)
    learner = LanguageLearner(models, 1.0, micro_batch_tokens=budget)
    learner.find_tokens(rollout, optimizer)
    part, *_ = ALONE.plan(rollout.row_lengths, budget, rollout.prompts)
    with LiveBytes() as counter:
        before = counter.hold(weights)
        outputs = learner.evaluate(SimpleNamespace(rollout=rollout.select(torch.tensor(part.rows))))
        (outputs.logprobs.sum() + outputs.values.sum()).backward()
    moments = 8 * sum(weight.numel() for weight in weights)
    assert counter.restart() - before <= pass_trial.SHARE * (free - moments)
    assert 58 < budget.tokens <= 256


def test_a_row_that_does_not_fit_ends_the_run_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_trial, "free_memory", lambda: 10_000)
    passes = Passes()
    needed = passes.peak(max(LENGTHS))
    with pytest.raises(MemoryError, match=f"a row of 12 tokens tried to allocate {needed} bytes"):
        find_tokens(AdaptiveTokens(8192), LENGTHS, passes, passes.optimizer, ranks=ALONE)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_trial_changes_no_result_and_a_resumed_run_makes_none(
    num_minibatches: int, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(name: str, **more: Any) -> Config:
        return configure(policy, tmp_path / name, num_minibatches=num_minibatches, **more)

    run_ppo(configured("given"), prompts=PROMPTS, reward=len_of)
    run_ppo(configured("auto", micro_batch_tokens="auto"), prompts=PROMPTS, reward=len_of)
    assert model_bytes(tmp_path / "auto") == model_bytes(tmp_path / "given") != {}
    monkeypatch.setattr(pass_trial, "free_memory", lambda: 1_200_000)
    run_ppo(configured("little", micro_batch_tokens="auto", num_updates=1), prompts=PROMPTS, reward=len_of)
    monkeypatch.undo()
    run_ppo(configured("little", micro_batch_tokens="auto"), prompts=PROMPTS, reward=len_of, resume=Resume())
    found = {row["memory/micro_batch_tokens"] for row in metrics_of(tmp_path / "little")}
    assert len(found) == 1
    assert 8 <= found.pop() <= 1024
