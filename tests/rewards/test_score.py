"""Scores as tensors: token scores at their tokens, and the rows that are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt, encode_text
from kedge.rewards import CallLimits, Responses, RewardTerm, load_reward, penalties
from kedge.rewards.function import FunctionReward
from kedge.rewards.score import MissingEos, continuation, describe_responses, score_rollout
from kedge_base.errors import UnscoredError
from kedge_tasks import verify
from tests.models.test_actor_critic import RESPONSES, make_rollout
from tests.tiny import tiny_sentencepiece_tokenizer, tiny_tokenizer

PROCESS = "tests.rewards.worker.misbehaving:token_scores"
TOKENIZER = tiny_tokenizer()


def token_scores(completion_ids):
    """The same as `PROCESS`, in this process."""
    return [[float(id) for id in ids] if len(ids) != 3 else None for ids in completion_ids]


def scored(*terms, eos_score=None, limits=None, rollout=None):
    return score_rollout(
        rollout or make_rollout(fill=7),
        [Prompt(f"prompt {row}", {}) for row in range(3)],
        load_reward(list(terms), limits=limits),
        TOKENIZER,
        max_new_tokens=5,
        missing_eos=MissingEos(eos_score),
    )


def at_tokens(*rows, width=5):
    """The oracle: a row of numbers, then zeros to the padded width."""
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])


def test_an_outcome_reward_has_no_token_scores():
    result = scored(lambda completions: [1.0, 2.0, 3.0])
    assert (result.scores.tolist(), result.token_scores) == ([1.0, 2.0, 3.0], None)


@pytest.mark.parametrize("function", [token_scores, PROCESS])
def test_token_scores_stand_at_the_response_tokens_of_the_kept_rows(function):
    kept = [row for row in range(3) if len(RESPONSES[row]) != 3]
    result = scored(RewardTerm(function, 0.5))
    assert len(kept) == 2
    assert result.prompts == [f"prompt {row}" for row in kept]
    assert torch.equal(result.token_scores, 0.5 * at_tokens(*(RESPONSES[row] for row in kept)))
    assert (result.token_scores[~result.rollout.token_mask] == 0).all()
    assert result.scores.tolist() == [0.0, 0.0]
    assert result.metrics()["score/token_scores"] == sum(sum(RESPONSES[row]) for row in kept) / 2


def test_token_scores_skip_slots_that_are_not_counted():
    def all_scores(completion_ids):
        return [[float(id) for id in ids] for ids in completion_ids]

    rollout = make_rollout()
    mask = rollout.token_mask.clone()
    mask[1, 1:3] = False
    result = scored(token_scores, rollout=replace(rollout, token_mask=mask, action_mask=mask))
    # The counted tokens of row 1 are 22, 25 and 26: three, for which the function has no score.
    assert result.prompts == ["prompt 2"]
    result = scored(all_scores, rollout=replace(rollout, token_mask=mask, action_mask=mask))
    assert result.token_scores[1].tolist() == [22.0, 0.0, 0.0, 25.0, 26.0]


def test_with_a_second_source_every_row_is_kept_and_the_eos_penalty_changes_scores_alone():
    result = scored(RewardTerm(PROCESS, 2.0), RewardTerm(lambda completions: [1.0, 2.0, 3.0], 0.5), eos_score=-1.0)
    expected = at_tokens(*(RESPONSES[row] if len(RESPONSES[row]) != 3 else [] for row in range(3)))
    assert torch.equal(result.token_scores, 2.0 * expected)
    assert result.scores.tolist() == [0.5, -1.0, -1.0]


def test_rows_that_a_process_reward_fails_on_are_dropped():
    def picky(completion_ids):
        if RESPONSES[1] in completion_ids:
            raise ValueError("no")
        return [[1.0] * len(ids) for ids in completion_ids]

    result = scored(picky, lambda completions: [1.0] * len(completions), limits=CallLimits(retries=0, on_error="drop"))
    assert result.prompts == ["prompt 0", "prompt 2"]
    assert torch.equal(result.token_scores, at_tokens(*([1.0] * len(RESPONSES[row]) for row in (0, 2))))


def test_a_rollout_without_any_score_is_an_error():
    with pytest.raises(UnscoredError, match="scored none of 3 responses"):
        scored(lambda completions: [None] * 3)


def test_special_tokens_of_a_response_are_part_of_its_text() -> None:
    """All but padding and the token that stopped it: a format reward has to see its `<think>`."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<end>"]})
    texts = ["<think>Tides.</think> At sea.<eos>", "<think>T<end>", "<bos>cut"]
    ids = [tokenizer.encode(text) for text in texts]
    width = max(map(len, ids))
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in ids])
    rollout = replace(
        make_rollout(),
        response_ids=torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(mask.shape),
        stopped=torch.tensor([True, True, False]),
    )
    prompts = [Prompt("a")] * 3
    told = describe_responses(rollout, prompts, tokenizer)
    assert told.completions == ["<think>Tides.</think> At sea.", "<think>T", "<bos>cut"]
    assert told.response_ids == ids


CALL, RESULT, LAST = "I use <add>6 and 1</add>", "\n<|tool|>\n42\n<|assistant|>\n", "I do not know."


def episode(*parts, prompt="How many?", stopped=True, paid=True):
    """A rollout of one episode: texts of the policy, True, and of the other side; a stop token ends the policy's."""
    ids, own = [], []
    for text, is_own in parts:
        tokens = TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * is_own
        ids += tokens
        own += [is_own] * len(tokens)
    if not stopped:
        ids, own = ids[:-1], own[:-1]
    prompt_ids = torch.tensor([TOKENIZER.encode(prompt, add_special_tokens=False)])
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    one = torch.zeros(1, dtype=torch.long)
    return Rollout(
        prompt_ids, prompt_ids >= 0, torch.tensor([ids]), mask, torch.tensor([own]), mask.float(),
        torch.tensor([stopped]), one, one, rewards=0.0 * mask if paid else None,
    )  # fmt: skip


def told(rollout, prompt="How many?", **columns):
    prompts = [Prompt(prompt, columns)]
    return describe_responses(rollout, prompts, TOKENIZER, max_new_tokens=99)


@pytest.mark.parametrize("paid", [True, False], ids=["environment", "from elsewhere"])
def test_verifiers_read_the_last_turn_and_functions_what_they_name(paid):
    played = episode((CALL, True), (RESULT, False), (LAST, True), paid=paid)
    responses = told(played)
    assert responses.completions == [f"{CALL}<eos>{RESULT}{LAST}"]
    seen = {}

    def asks(completions, last_turns, episodes, **rest):
        seen.update(completions=completions, last_turns=last_turns, episodes=episodes, rest=rest)
        return [0.0]

    FunctionReward(asks).score(responses)
    assert seen["completions"] == responses.completions
    assert seen["last_turns"] == [LAST]
    assert seen["episodes"] == [
        [
            {"role": "assistant", "content": CALL},
            {"role": "environment", "content": RESULT},
            {"role": "assistant", "content": LAST},
        ]
    ]
    assert "episodes" not in seen["rest"]
    right = episode((CALL, True), ("\n<|tool|>\n7\n<|assistant|>\n", False), ("#### 42", True))
    for name, row in {
        "number": {"answer": 42},
        "gsm8k": {"answer": "#### 42"},
        "pattern": {"pattern": "42"},
        "exact": {"answer": "#### 42"},
        "json_schema": {"schema": {"type": "number"}},
    }.items():
        for verifier in (getattr(verify, name), partial(getattr(verify, name))):
            assert FunctionReward(verifier).score(told(played, **row)) == [0.0], name
            if name != "json_schema":
                assert FunctionReward(verifier).score(told(right, **row)) == [1.0], name
    value = episode((CALL, True), (RESULT, False), ("42", True))
    assert FunctionReward(verify.json_schema).score(told(value, schema={"type": "number"})) == [1.0]


def test_a_verifier_by_name_reads_the_last_turn_as_well():
    rollout = episode((CALL, True), (RESULT, False), (LAST, True))
    for name, said in (("number", 0.0), ("exact", 1.0)):
        source = load_reward(f"kedge_tasks.verify:{name}")
        answer = {"number": "42", "exact": LAST}[name]
        result = score_rollout(rollout, [Prompt("How many?", {"answer": answer})], source, TOKENIZER,
                               max_new_tokens=99)  # fmt: skip
        assert result.scores.tolist() == [said], name


def test_penalties_read_the_last_turn():
    """By hand: what the tool says repeats every word, and the policy none; its last turn is blank, or short."""
    echo = "\n<|tool|>\n" + "no such file " * 9
    blank = told(episode((CALL, True), (echo, False), (" ", True)))
    assert FunctionReward(penalties.blank).score(blank) == [-1.0]
    said = told(episode((CALL, True), (echo, False), ("I found it.", True)))
    assert FunctionReward(penalties.repetitive).score(said) == [0.0]
    assert FunctionReward(penalties.ill_formed, settings={"pattern": "I .*[.]"}).score(said) == [0.0]


def test_turns_with_nothing_between_them_are_told_apart():
    responses = told(episode(("six", True), ("seven", True)))
    assert responses.last_turns == ["seven"]
    assert [each["content"] for each in responses.episodes[0]] == ["six", "seven"]
    cut = told(episode((CALL, True), (RESULT, False), (LAST, True), stopped=False))
    assert cut.last_turns == [LAST]


def test_turns_are_those_that_were_played_whatever_ends_the_responses_of_the_batch():
    """No response of the batch stopped, so its last tokens do not say what ends a turn."""
    played = episode(("six", True), ("seven", True), ("eight", True), stopped=False)
    starts = torch.zeros_like(played.token_mask)
    ends = (played.response_ids[0] == TOKENIZER.eos_token_id).nonzero().squeeze(1)
    starts[0, torch.cat([torch.tensor([0]), ends + 1])] = True
    played = replace(played, turn_starts=starts, parents=torch.arange(-1, starts.shape[1] - 1)[None])
    assert told(played).last_turns == ["eight"]
    stops = [TOKENIZER.eos_token_id]
    responses = describe_responses(played, [Prompt("How many?")], TOKENIZER, stop_tokens=stops)
    assert [each["content"] for each in responses.episodes[0]] == ["six", "seven", "eight"]
    result = score_rollout(played, [Prompt("How many?")], load_reward(lambda episodes: [len(episodes[0])]), TOKENIZER,
                           max_new_tokens=99, stop_tokens=stops)  # fmt: skip
    assert result.scores.tolist() == [3.0]


def test_each_turn_is_decoded_with_few_tokens_before_it(monkeypatch):
    """Else an episode of many turns is decoded from its start for each of them."""
    parts = [(f" mañana {number} 水", number % 2 == 0) for number in range(61)]
    played = episode(*parts)
    decode, decoded = TOKENIZER.decode, []
    monkeypatch.setattr(TOKENIZER, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    responses = told(played)
    assert [each["content"] for each in responses.episodes[0]] == [text for text, _ in parts]
    assert sum(decoded) < 61 * 60 + 4 * played.num_tokens


@pytest.mark.parametrize("tokenizer", [TOKENIZER, tiny_sentencepiece_tokenizer()])
def test_a_response_is_decoded_with_the_end_of_its_prompt(tokenizer, monkeypatch):
    """Of which more is needed where bytes spell a word that the response goes on with."""
    decode, decoded = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    asked = encode_text(tokenizer, "The tide went out. " * 99)
    assert continuation(tokenizer, asked, encode_text(tokenizer, " So did we.", continues=True)) == " So did we."
    assert sum(decoded) < len(asked) / 4
    ids = encode_text(tokenizer, "ทะเลสาบสงบนิ่งในยามเช้า")
    for cut in range(1, len(ids)):
        asked, said = ids[:cut], ids[cut:]
        begins, whole = decode(asked), decode(ids)
        expected = whole[len(begins) :] if whole.startswith(begins) else decode(said)
        assert continuation(tokenizer, asked, said) == expected


@pytest.mark.parametrize(
    ("parts", "prompt", "expected"),
    [
        ([("42", True)], "How many?<think>\n", "<think>42"),
        ([("42", True)], "How many?", "42"),
        ([(CALL, True), ("\n7\n<|assistant|>\n[THINK]", False), ("42", True)], "How many?", "[THINK]42"),
        ([(CALL, True), ("\n7\n<|assistant|>\n", False), ("42", True)], "How many?<think>\n", "42"),
        ([("6", True), ("42", True)], "How many?<think>\n", "42"),
    ],
    ids=["prompt", "none", "turn", "only the first", "silent"],
)
def test_a_thought_that_was_opened_before_a_turn_is_seen_by_verifiers_alone(parts, prompt, expected):
    responses = told(episode(*parts, prompt=prompt), prompt)
    assert responses.answers == [expected]
    assert responses.last_turns == ["42"]
    assert not responses.completions[0].startswith("<think>")


def test_batches_of_episodes_are_joined_and_chosen_from():
    first = told(episode((CALL, True), (RESULT, False), (LAST, True)))
    second = told(episode(("42", True)))
    both = Responses.joined([first, second])
    assert both.last_turns == [LAST, "42"]
    assert both.select([1]).answers == ["42"]


def test_scores_of_what_the_policy_only_read_are_paid_for_its_token_before():
    """By hand: 1 for each of three tokens of a tool, in the middle and at the end; nothing is lost."""
    mask = torch.tensor([[True, True, False, False, False, True], [True, False, False, False, False, False]])
    scores = torch.tensor([[0.5, 0.0, 1.0, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]])
    rollout = make_rollout()
    rollout = replace(
        rollout.select(torch.tensor([0, 1])), response_ids=torch.ones(2, 6, dtype=torch.long),
        token_mask=torch.ones(2, 6, dtype=torch.bool), action_mask=mask, logprobs=torch.zeros(2, 6),
    )  # fmt: skip
    result = score_rollout(rollout, [Prompt("a"), Prompt("b")], load_reward(lambda completion_ids: scores), TOKENIZER,
                           max_new_tokens=6)  # fmt: skip
    assert result.token_scores.tolist() == [[0.5, 3.0, 0.0, 0.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert result.total_scores.tolist() == result.terms.totals()
