"""Rows with the same prompt, which share its tokens in a pass, against a pass that reads every row by itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, combinations
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig

from kedge.algorithm.experience import PolicyOutputs, Rollout
from kedge.algorithm.prefixes import LEAST_SHARED, common_start, prefix_tree
from kedge.models import ActorCritic, LanguageModel, ScalarModel, TokenRows, response_logprobs, score_rows
from kedge.models.live_bytes import LiveBytes
from kedge.models.packing import packed
from kedge.models.packing import rows as packing_rows
from kedge.models.packing.trunk import Trunk
from tests.float64 import in_float64
from tests.models.families import ARCHITECTURES, PACKED, language_model
from tests.tiny import FAMILIES, tiny_causal_lm, tiny_reward_model, tiny_tokenizer

PROMPTS = ([5, 6, 7, 8], [20, 21], [30, 31, 32], [20, 21])
OF_ROW = (0, 1, 0, 2, 1, 3, 0, 0)
"""Each row's prompt: one of four rows, one of two, and two of one, of which one is the same as that of two."""
LENGTHS = (6, 1, 5, 3, 2, 2, 1, 2)
NUM_ACTIONS = sum(LENGTHS)


def responses(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [[60 + 8 * row + place for place in range(length)] for row, length in enumerate(lengths)]


def token_rows(lengths: tuple[int, ...] = LENGTHS, prompts: tuple[list[int], ...] = PROMPTS) -> TokenRows:
    rows = [[*prompts[number], *response] for number, response in zip(OF_ROW, responses(lengths), strict=True)]
    return replace(TokenRows.of(rows), prompts=tuple(((number, len(prompts[number])),) for number in OF_ROW))


def make_rollout(group: tuple[int, ...] = OF_ROW) -> Rollout:
    prompt_ids = torch.tensor([[0] * (4 - len(PROMPTS[number])) + PROMPTS[number] for number in OF_ROW])
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.tensor([response + [0] * (max(LENGTHS) - len(response)) for response in responses()])
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_ids > 0,
        response_ids=ids,
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(mask.shape),
        stopped=mask[:, 0],
        group=torch.tensor(group),
        policy_version=torch.zeros(len(ids), dtype=torch.long),
    )


def each_row_by_itself() -> AbstractContextManager[object]:
    return mock.patch.object(Trunk, "shares_up_to", 0)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6 * max(1.0, largest), rtol=1e-6, msg=name)


@pytest.fixture(params=["cpu", "gpu", "gpu-long"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the rests of rows are arranged: prompt by prompt, as on a GPU all at once, or there a few at once."""
    if request.param != "cpu":
        for module in (packing_rows, packed):
            monkeypatch.setattr(module, "on_accelerator", lambda device: True)
    if request.param == "gpu-long":
        monkeypatch.setattr(packing_rows, "MOST_SEEN", 4 * max(LENGTHS) * (max(LENGTHS) + max(map(len, PROMPTS))))
    return request.param


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 2, 1, 1, 2, 2, 1, 1)])
def test_states_and_gradients_are_those_of_each_row_by_itself(name: str, lengths: tuple[int, ...]) -> None:
    model = language_model(name)
    # Short enough for the window of the one that has one, or too long for it.
    prompts = PROMPTS if lengths == LENGTHS else ([5, 6, 7], [20, 21], [30, 31], [20, 21])
    rows = token_rows(lengths, prompts)
    assert (rows.longest <= model.trunk.shares_up_to) == (name in PACKED or (name == "mistral" and rows.longest <= 4))
    weights = torch.randn(len(rows.ids), 16, generator=torch.Generator().manual_seed(0)) / len(rows.ids)
    found = model.hidden(rows)
    (found * weights).sum().backward()
    ours = gradients(model)
    expected = torch.cat([model.hidden(TokenRows.of([row])) for row in map(list, rows.ids.split(rows.lengths))])
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=2e-6)
    assert_equal_gradients(ours, gradients(model))


def test_the_tokens_of_a_prompt_reach_the_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model("llama")
    seen = []
    model.trunk.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    model.hidden(token_rows())
    assert seen == [sum(map(len, PROMPTS)) + sum(LENGTHS)]
    with each_row_by_itself():
        model.hidden(token_rows())
    assert seen[1:] == [len(token_rows().ids)]


def test_on_a_gpu_the_rests_of_all_prompts_are_one_group(place: str) -> None:
    rests = [((slice(3, 7),), (6, 5, 1)), ((slice(0, 3),), (2, 2)), ((slice(7, 9),), (4,))]
    groups = packing_rows.rectangles(TokenRows(torch.arange(9), (4, 3, 2)), rests)
    # Whole rows first: 4 and 3 share a rectangle. Then 6 and 5, 1, and those of the other prompts.
    sizes = {"cpu": [11, 1, 4, 4], "gpu": [20], "gpu-long": [14, 6]}
    assert [group.num_tokens for group in groups] == [7, 2, *sizes[place]]


def test_the_mask_of_several_prompts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_rows, "on_accelerator", lambda device: True)
    rests = [((slice(2, 4),), (2,)), ((slice(4, 5),), (1,)), ((slice(4, 5),), (1,))]
    *_, group = packing_rows.rectangles(TokenRows(torch.arange(5), (2, 2, 1)), rests)
    assert group.prompt.tolist() == [[2, 3], [4, 4], [4, 4]]
    first, second = [[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 1, 0], [1, 0, 1, 1]]
    assert group.mask[:, 0].exp().tolist() == [first, second, second]
    assert group.slots.tolist() == [0, 1, 2, 4]


def test_on_a_gpu_too_each_query_head_attends_with_its_own_key_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "on_accelerator", lambda device: True)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, time, 4, generator=draw) for heads, time in ((6, 5), (3, 7), (3, 7)))
    mask = torch.rand(2, 1, 5, 7, generator=draw) < 0.7
    mask[..., 0] = True
    heads = [
        nn.functional.softmax(query[:, head] @ key[:, head // 2].mT / 2 + mask[:, 0].log(), dim=-1)
        @ value[:, head // 2]
        for head in range(6)
    ]
    found = packed.attend(query, key, value, scaling=0.5, mask=mask, device="cpu")
    torch.testing.assert_close(found, torch.stack(heads, dim=1))


def test_rows_with_the_same_tokens_share_a_prompt_whatever_their_groups() -> None:
    lengths = [len(PROMPTS[number]) for number in OF_ROW]
    expected = [((number, length),) for number, length in zip([0, 1, 0, 3, 1, 1, 0, 0], lengths, strict=True)]
    for group in (OF_ROW, (0,) * 8, tuple(range(8))):
        assert make_rollout(group).prompts == expected
    assert make_rollout().num_distinct_tokens == sum(map(len, PROMPTS[:3])) + sum(LENGTHS)
    # What is below the padding does not count.
    rollout = make_rollout()
    filled = replace(rollout, prompt_ids=torch.where(rollout.prompt_mask, rollout.prompt_ids, torch.arange(8)[:, None]))
    assert filled.prompts == rollout.prompts


START = [40, 41, 42, 43]
WITH_A_START = (
    [*START, 5, 6, 7, 8], [*START, 5, 6, 9], START, [20, 21], [*START, 30], [20, 22], [*START, 5, 6, 7, 8], START
)  # fmt: skip
"""A common start of seven rows of which two end with it; within these, one of three rows; and two that differ."""


def test_the_pieces_of_prompts_by_hand() -> None:
    assert prefix_tree([tuple(each) for each in WITH_A_START], longest=20) == [
        ((-1, 4), (-2, 2), (0, 2)), ((-1, 4), (-2, 2), (1, 1)), ((-1, 4), (2, 0)), ((3, 2),), ((-1, 4), (4, 1)),
        ((5, 2),), ((-1, 4), (-2, 2), (0, 2)), ((-1, 4), (2, 0)),
    ]  # fmt: skip
    # A piece has at least an eleventh of the longest row: 4 tokens of 44, 6 of 66.
    of_first = [prefix_tree([tuple(each) for each in WITH_A_START], longest=longest)[0] for longest in (44, 45, 66, 67)]
    assert of_first == [((-1, 4), (0, 4)), ((-1, 6), (0, 2)), ((-1, 6), (0, 2)), ((0, 8),)]
    assert prefix_tree([(1, 2), (1, 2)], longest=3) == [((0, 2),)] * 2
    assert prefix_tree([], longest=0) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), max_size=6).map(tuple), max_size=12), st.integers(0, 40))
def test_pieces_have_the_same_numbers_where_texts_are_the_same(texts: list[tuple[int, ...]], longest: int) -> None:
    pieces = prefix_tree(texts, longest=longest)
    places = [list(accumulate((tokens for _, tokens in each), initial=0)) for each in pieces]
    assert [each[-1] for each in places] == list(map(len, texts))
    known: dict[int, tuple[int, ...]] = {}
    for text, each, ends in zip(texts, pieces, places, strict=True):
        assert all(tokens >= max(1, LEAST_SHARED * longest) for _, tokens in each[:-1])
        for (number, _), end in zip(each, ends[1:], strict=True):
            assert known.setdefault(number, text[:end]) == text[:end]
    # Two texts have no more in common than their shared pieces and what is too short to be one.
    for (one, first), (other, second) in combinations(zip(texts, pieces, strict=True), 2):
        shared = sum(tokens for each, tokens in first if each in dict(second))
        common = common_start([one, other])
        assert shared <= common
        assert one != other or shared == len(one)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", PACKED)
def test_states_and_gradients_of_rows_that_share_starts_and_prompts(name: str) -> None:
    model = language_model(name)
    rows = [[*prompt, *response] for prompt, response in zip(WITH_A_START, responses(), strict=True)]
    rows[7] = START  # a row that ends with a piece of others
    pieces = tuple(prefix_tree([tuple(each) for each in WITH_A_START], longest=0))
    shared = replace(TokenRows.of(rows), prompts=pieces)
    weights = torch.randn(len(shared.ids), 16, generator=torch.Generator().manual_seed(0)) / len(shared.ids)
    seen: list[int] = []
    hook = model.trunk.model.register_forward_pre_hook(
        lambda module, inputs, named: seen.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    found = model.hidden(shared)
    hook.remove()
    distinct = {tuple(row[: place + 1]) for row in rows for place in range(len(row))}
    assert seen == [len(distinct)]
    (found * weights).sum().backward()
    ours = gradients(model)
    expected = torch.cat([model.hidden(TokenRows.of([row])) for row in rows])
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=2e-6)
    assert_equal_gradients(ours, gradients(model))


def scored_rows() -> list[list[int]]:
    """Responses to prompts that begin alike, one of them twice; and a row that others begin with."""
    rows = [[*prompt, *response] for prompt, response in zip(WITH_A_START, responses(), strict=True)]
    return [*rows, rows[1], START]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [None, 20, 1])
def test_scores_of_rows_that_begin_alike_are_those_of_each_row_by_itself(
    family: str, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = ScalarModel(tiny_reward_model(family), tiny_tokenizer()), scored_rows()
    assert model.trunk is not None
    in_float64(model, monkeypatch)
    seen: list[int] = []
    model.trunk.model.register_forward_pre_hook(
        lambda module, inputs, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    found = score_rows(model, rows, micro_batch_tokens=budget)
    num_read = sum(seen)
    assert max(seen) <= max(budget or 1000, max(map(len, rows)))
    if budget is None:  # 20 alone is shorter than an eleventh of 14 tokens, so it is read twice
        assert seen == [1 + len({tuple(row[: place + 1]) for row in rows for place in range(len(row))})]
    expected = torch.cat([score_rows(model, [row]) for row in rows])
    assert found.dtype == torch.float64
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    seen.clear()
    with each_row_by_itself():
        score_rows(model, rows, micro_batch_tokens=budget)
    assert sum(seen) == sum(map(len, rows))
    assert (num_read < sum(seen)) == (budget != 1)


def test_only_a_decoder_shares_what_rows_that_are_scored_begin_with() -> None:
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    encoder = ScalarModel(AutoModelForSequenceClassification.from_config(config), tiny_tokenizer())
    rows = scored_rows()
    assert encoder.shares_up_to == 0
    assert encoder.pieces(rows) == [((number, len(row)),) for number, row in enumerate(rows)]
    scores = torch.cat([score_rows(encoder, [row]) for row in rows])
    torch.testing.assert_close(score_rows(encoder, rows, micro_batch_tokens=30), scores, atol=1e-5, rtol=1e-5)


def outputs(models: ActorCritic, rollout: Rollout) -> PolicyOutputs:
    return models(rollout, temperature=0.7, entropy_gradient=True, value_after_last=True)


def summed(found: PolicyOutputs) -> Tensor:
    assert found.values is not None
    parts = (found.logprobs, found.entropy, found.values)
    return torch.stack([(each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in parts]).sum()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probabilities_entropies_values_and_gradients_are_the_same(
    family: str, critic: str, checkpointing: bool
) -> None:
    tokenizer = tiny_tokenizer()
    policy = LanguageModel(tiny_causal_lm(family), tokenizer, value_head=critic == "shared")
    if policy.value_head is not None:
        nn.init.normal_(policy.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    models = ActorCritic(policy, ScalarModel(tiny_reward_model(family), tokenizer) if critic == "separate" else None)
    if checkpointing:
        models.checkpoint_activations()
    rollout = make_rollout()
    found = outputs(models, rollout)
    reference = response_logprobs(policy, rollout, temperature=0.7)
    values = models.values(rollout)
    summed(found).backward()
    ours = gradients(models)
    alone = [outputs(models, rollout.select(torch.tensor([row]))) for row in range(rollout.num_responses)]
    columns = zip(*((each.logprobs, each.entropy, each.values) for each in alone), strict=True)
    expected = PolicyOutputs(*map(torch.cat, columns))
    summed(expected).backward()
    theirs = gradients(models)
    for one, other in (
        (found.logprobs, expected.logprobs), (found.entropy, expected.entropy), (found.values, expected.values),
        (reference, expected.logprobs),
    ):  # fmt: skip
        torch.testing.assert_close(one, other, atol=1e-6, rtol=2e-6)
    action_values = torch.where(rollout.action_mask, expected.values, 0.0)
    torch.testing.assert_close(values, action_values, atol=1e-6, rtol=2e-6)
    assert_equal_gradients(ours, theirs)


def test_the_gradients_are_the_same_to_the_bit_each_time() -> None:
    model = language_model("llama")
    generator = torch.Generator().manual_seed(0)
    # Enough tokens for several threads to add their gradients up.
    rows = torch.randint(3, 90, (64, 80), generator=generator)
    rows[:] = torch.cat([rows[:1, :60].expand(64, -1), rows[:, 60:]], dim=1)
    shared = replace(TokenRows.of(rows.tolist()), prompts=(((0, 60),),) * 64)
    weights = torch.randn(len(shared.ids), 16, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = []
        for _ in range(40):  # on a busy machine, threads that run by turns add up in the same order most of the time
            (model.hidden(shared) * weights).sum().backward()
            found.append(torch.cat([each.flatten() for each in gradients(model).values()]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)


def test_the_gradients_of_prompts_need_no_more_work_for_each_than_for_a_few() -> None:
    """The gradient of a slice would be as large as the pass, for each prompt."""
    model, work = language_model("llama"), list[float]()
    for number in (16, 64):
        rows = torch.arange(8)[None] + 3 + torch.arange(2 * number)[:, None]
        rows[1::2, :6] = rows[::2, :6]
        prompts = tuple(((row // 2, 6),) for row in range(2 * number))
        with LiveBytes() as counter:
            model.hidden(replace(TokenRows.of(rows.tolist()), prompts=prompts)).sum().backward()
        work.append(counter.work["bytes"])
    assert work[1] < 4 * work[0]


def test_gradients_add_up_in_full_precision_in_a_pass_in_bf16() -> None:
    model = language_model("llama")
    rows = token_rows()
    weights = torch.randn(len(rows.ids), 16, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for shares in (True, False):
            in_bf16 = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
            with in_bf16, nullcontext() if shares else each_row_by_itself():
                (model.hidden(rows) * weights).sum().backward()
            found.append(torch.cat([each.flatten() for each in gradients(model).values()]))
    exact, _, shared, plain = found
    assert (shared - exact).norm() < 1.2 * (plain - exact).norm()
