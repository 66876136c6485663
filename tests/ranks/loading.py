"""Compares models loaded sharded on several ranks with whole ones: `python -m tests.ranks.loading FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from kedge.models import (
    LanguageModel,
    ScalarModel,
    TokenRows,
    hold_frozen,
    language,
    load_language_model,
    load_scalar_model,
    load_tokenizer,
    own_stop_tokens,
    score_rows,
)
from kedge.models.sharded import can_be_sharded, layers_of, shard_model
from kedge.ranks import Ranks
from kedge.ranks.sharding import whole, whole_weights
from kedge.ranks.start import join_ranks
from tests.tiny import FAMILIES, save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

ROWS = [[5, 9, 17, 33, 8, 60], [7, 44, 12]]
UNTIED = "untied by its file"


def save_models(folder: Path) -> None:
    """Policies in `policies`, scoring models in `scoring`."""
    for family in FAMILIES:
        save_tiny_policy(folder / "policies" / family, family)
    save_tiny_reward_model(folder / "scoring" / "llama")
    no_pad = tiny_tokenizer()
    no_pad.pad_token = None
    save_tiny_policy(folder / "policies" / "gets a pad token", tokenizer=no_pad)
    # GPT-2 ties its embeddings, but this file has an output layer of its own.
    file = save_tiny_policy(folder / "policies" / UNTIED, "gpt2") / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["transformer.wte.weight"] * 2}, file, {"format": "pt"})
    encoder = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    for to_save in (BertForSequenceClassification(encoder), tiny_tokenizer()):
        to_save.save_pretrained(folder / "scoring" / "an encoder")


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights and buffers by all of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: whole(each.detach()) for name, each in named}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same weights and buffers, to the bit, in the same number formats."""
    ours, theirs = values_of(one), values_of(other)
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert each.dtype == theirs[name].dtype, name
        assert torch.equal(each, theirs[name]), name


def num_empty(model: nn.Module) -> int:
    return sum(each.is_meta for each in model.parameters())


@torch.no_grad()
def check_policy(folder: Path, ranks: Ranks, *, frozen: bool) -> None:
    """A policy with a value head, or a reference in bf16."""
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)  # of the row for a new pad token
    alone = load_language_model(folder, tokenizer=tokenizer, value_head=not frozen)
    torch.manual_seed(0)
    model = load_language_model(folder, tokenizer=tokenizer, value_head=not frozen, ranks=ranks)
    assert model.on_every_rank == (folder.name == UNTIED)
    assert (num_empty(model) == 0) == (ranks.is_first or model.on_every_rank)
    model.trunk.check_decoding()
    if frozen:
        hold_frozen(alone, "bf16", "bf16")
        hold_frozen(model, "bf16", "bf16", ranks)
    shard_model(model, ranks, "bf16" if frozen else "fp32", offload=frozen)
    assert num_empty(model) == 0
    assert_same(alone, model)
    rows = TokenRows.of(ROWS)
    with torch.autocast("cpu", torch.bfloat16, enabled=frozen):
        expected, found = (each.logits(each.hidden(rows)) for each in (alone, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert own_stop_tokens(tokenizer, model) == own_stop_tokens(tokenizer, alone)


def check_chunks(folder: Path, ranks: Ranks) -> None:
    """Ranks that compute their logits in different numbers of chunks get the gradients of one with all rows."""
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    alone = load_language_model(folder, tokenizer=tokenizer)
    torch.manual_seed(0)
    model = load_language_model(folder, tokenizer=tokenizer, ranks=ranks)
    shard_model(model, ranks)
    own = [ROWS[rank % len(ROWS)] for rank in range(ranks.count)]
    with patch.object(language, "MAX_LOGITS", 2 * len(model.forbidden)):
        for each, rows in ((alone, own), (model, [own[ranks.number]])):
            packed = TokenRows.of(rows)
            (logprobs,) = each.over_logits(
                lambda logits, tokens: (logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0],),
                each.hidden(packed),
                packed.ids,
            )
            logprobs.sum().backward()
    assert_same_gradients(alone, model, ranks)


def assert_same_gradients(alone: LanguageModel, model: LanguageModel, ranks: Ranks, *, times: int = 1) -> None:
    """The sum of the ranks' gradients is so many times that of one process."""
    ranks.sum_gradients(model.parameters())
    for (name, one), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        if one.grad is None or other.grad is None:
            assert one.grad is other.grad is None, name
        else:
            assert other.grad.dtype == torch.float32
            torch.testing.assert_close(whole(other.grad), times * one.grad, rtol=1e-5, atol=1e-5, msg=name)


def check_scoring(folder: Path, ranks: Ranks) -> None:
    """A reward model."""
    tokenizer = load_tokenizer(folder)
    alone = load_scalar_model(folder, tokenizer=tokenizer)
    model = load_scalar_model(folder, tokenizer=tokenizer, ranks=ranks)
    if can_be_sharded(model):
        shard_model(model, ranks, "fp32")
    assert_same(alone, model)
    torch.testing.assert_close(score_rows(model, ROWS, ranks=ranks), score_rows(alone, ROWS), rtol=1e-5, atol=1e-5)


def check_new_head(folder: Path, ranks: Ranks) -> None:
    """A new head is that of a single process, and the next random numbers are, too."""
    tokenizer = load_tokenizer(folder)
    loaded: list[LanguageModel | ScalarModel] = []
    drawn: list[Tensor] = []
    for by in (Ranks(), ranks):
        torch.manual_seed(3)
        loaded.append(load_scalar_model(folder, tokenizer=tokenizer, init="fresh", ranks=by))
        drawn.append(torch.rand(3))
    shard_model(loaded[1], ranks, "fp32")
    assert_same(*loaded)
    assert torch.equal(*drawn)


def check_bf16(folder: Path, ranks: Ranks) -> None:
    """Layers gathered in bf16 give what autocast does with whole fp32 weights: the states, and all gradients.

    The sum over the ranks, of which each reads the same rows, is that many times the gradient of one.
    """
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    alone = load_language_model(folder, tokenizer=tokenizer)
    torch.manual_seed(0)
    model = load_language_model(folder, tokenizer=tokenizer, ranks=ranks)
    shard_model(model, ranks, "bf16")
    assert_same(alone, model)
    with whole_weights([model]):
        weights = [each for layer in layers_of(model.trunk.model) for each in layer.parameters()]
        assert {each.dtype for each in weights if each.ndim == 2} == {torch.bfloat16}
    outputs: list[Tensor] = []
    for each in (alone, model):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(each.logits(each.hidden(TokenRows.of(ROWS))))
        outputs[-1].log_softmax(-1)[:, 7].sum().backward()
    assert torch.equal(*outputs)
    assert_same_gradients(alone, model, ranks, times=ranks.count)


if __name__ == "__main__":
    place, all_ranks = Path(sys.argv[1]), join_ranks("shard")
    assert all_ranks.is_sharded
    for each in sorted((place / "policies").iterdir()):
        for is_frozen in (False, True):
            check_policy(each, all_ranks, frozen=is_frozen)
        check_bf16(each, all_ranks)
        check_chunks(each, all_ranks)
        if each.name != UNTIED:  # its output layer is no part of a scoring model
            check_new_head(each, all_ranks)
    for each in sorted((place / "scoring").iterdir()):
        check_scoring(each, all_ranks)
    print(f"rank {all_ranks.number} compared all models")
