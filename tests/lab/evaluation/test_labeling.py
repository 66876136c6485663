"""Ranks computed by hand, and rankings of sampled responses."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.config import load_config
from kedge.data import Prompt, Ranking, read_rows
from kedge.rewards import Responses, load_reward
from kedge.runs.run import open_run
from kedge.stages.policy import Policy, SamplingSettings, load_policy
from kedge.stages.rankings import rank_responses, ranked_rows
from kedge_base.errors import RewardError
from tests.tiny import save_tiny_policy, tiny_tokenizer

SAMPLING = SamplingSettings(max_new_tokens=8, temperature=1.0, batch_size=5, seed=3)


@pytest.mark.parametrize(
    ("texts", "scores", "expected"),
    [
        (["a", "b", "c"], [0.5, 2.0, -1.0], (["a", "b", "c"], [2, 1, 3])),
        (["a", "b", "c"], [1.0, 2.0, 1.0], (["a", "b", "c"], [2, 1, 2])),
        (["a", "b"], [1.0, 1.0], ([], [])),
        (["a", "a", "b"], [1.0, 1.0, 2.0], (["a", "b"], [2, 1])),
        (["a", " \n", "b"], [1.0, 5.0, 2.0], (["a", "b"], [2, 1])),
        (["a", "b", "c"], [1.0, None, 2.0], (["a", "c"], [2, 1])),
        (["a", "b"], [None, 2.0], ([], [])),
    ],
)
def test_ranks(texts, scores, expected):
    assert rank_responses(texts, scores) == expected


def policy_in(tmp_path) -> Policy:
    save_tiny_policy(tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The boat"}\n')
    flags = {"model": str(tmp_path / "policy"), "out": str(tmp_path / "run")}
    config = load_config(None, [f"data.prompts={tmp_path / 'prompts.jsonl'}"], flags)
    return load_policy(str(config.model), config, open_run(config, "generate"))


def sampled(policy: Policy, prompts: list[Prompt], num_responses: int) -> Responses:
    repeated = [prompt for prompt in prompts for _ in range(num_responses)]
    return Responses.joined([each.responses for each in policy.sample(repeated, SAMPLING, title="label")])


def test_a_higher_score_has_a_smaller_rank(tmp_path):
    asked: dict[str, Any] = {}

    def shortest(prompts, completions, topic):
        asked.update(prompts=prompts, topic=topic)
        return [-len(text) for text in completions]

    prompts = [Prompt(f"Deck {number}:", {"topic": number, "title": "Rope"}) for number in range(4)]
    responses = sampled(policy_in(tmp_path), prompts, 3)
    rows = ranked_rows(prompts, responses, load_reward(shortest))
    assert asked["topic"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert set(rows[0]) == {"title", "prompt", "responses", "ranks"}
    for row in rows:
        lengths = [len(text) for text in row["responses"]]
        assert row["ranks"] == [1 + sum(other < length for other in set(lengths)) for length in lengths]
    records = read_rows(rows, "comparisons", tokenizer=tiny_tokenizer(), max_length=100).records
    assert len(records) == len(rows)
    assert all(isinstance(record, Ranking) for record in records)


def test_a_labeler_without_preferences_is_an_error(tmp_path):
    alike = load_reward(lambda completions: [1.0] * len(completions))
    prompts = [Prompt("Deck:")]
    responses = sampled(policy_in(tmp_path), prompts, 2)
    with pytest.raises(RewardError, match="scored all responses to each prompt the same"):
        ranked_rows(prompts, responses, alike)
