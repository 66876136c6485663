"""The checks of what is trained on: green for a plain trainer, and red for each bug where it should be."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest

from ppo_conformance.adapters.transformers_tokens import tokenizer_of
from ppo_conformance.checks import tokens
from ppo_conformance.protocol import Adapter, Deviation


def plain(case, *, bug=None):
    """A trainer in one page: turns are appended, or with `rendered` every turn reads a new text."""
    tokenizer = tokenizer_of(case)

    def rendered(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=bug == "adds_bos")

    ends = case["stop_ids"]
    messages = [*case["messages"]]
    read = encode(rendered(messages))
    rows, row, trained = [], [*read], [False] * len(read)
    for reply in [*case["replies"], None]:
        said = case["policy"](row)
        if bug == "retokenizes":
            said = [*encode(tokenizer.decode(said[:-1])), said[-1]]
        if bug == "cuts_text" and case["stop_strings"]:
            said = encode(tokenizer.decode(said).partition(case["stop_strings"][0])[0])
        if bug == "closes_cut_answers" and said[-1] not in ends:
            said = [*said, tokenizer.eos_token_id]
        counts = [True] * len(said)
        if bug == "leaves_out_the_end":
            counts[-1] = False
        if bug == "masks_padding":
            counts = [token != tokenizer.pad_token_id for token in said]
        row, trained = [*row, *said], [*trained, *counts]
        if reply is None:
            break
        text = tokenizer.decode(said[:-1])
        before, messages = messages, [*messages, {"role": "assistant", "content": text}, *reply]
        if bug in ("renders", "renders_in_one_row"):
            if bug == "renders":
                rows.append({"tokens": row, "trained": trained})
                row = encode(rendered(messages))
                trained = [False] * len(row)
            else:
                whole = encode(rendered(messages))
                place = len(encode(rendered(before)))
                row, trained = whole, [place <= at < place + len(said) for at in range(len(whole))]
            continue
        after = rendered([*before, {"role": "assistant", "content": "SENTINEL"}, *reply]).rpartition("SENTINEL")[2]
        if bug != "doubles_the_end":
            after = after.partition(tokenizer.decode(said[-1:]))[2]
        if bug == "drops_a_newline":
            after = after.removeprefix("\n")
        row = [*row, *encode(after)]
        trained += [False] * (len(row) - len(trained))
    return {"rows": [*rows, {"tokens": row, "trained": trained}]}


def red(bug, *traps):
    """The traps that turn red, of some or all, each with its templates and numbers of turns."""
    adapter = Adapter()
    adapter.trained_tokens = partial(plain, bug=bug)
    found = defaultdict(set)
    for check in tokens.checks():
        if traps and check.id.partition("/")[2] not in traps:
            continue
        try:
            check.run(adapter)
        except Deviation:
            found[check.id.partition("/")[2]].add(check.case)
    return found


@pytest.mark.parametrize("bug", [None, "renders"])
def test_a_correct_trainer_is_green_whether_it_appends_turns_or_renders_them_again(bug):
    assert red(bug) == {}


@pytest.mark.parametrize(
    ("bug", "trap", "among"),
    [
        ("adds_bos", "bos_twice", {"llama-3-1", "gemma-1", "deepseek-r1-1", "mistral-2"}),
        ("retokenizes", "retokenized", {"chatml-1", "llama-2-1", "zephyr-2"}),
        ("cuts_text", "stop_string", {"chatml-1", "mistral-1"}),
        ("closes_cut_answers", "cut", {"qwen2.5-1", "gemma-2"}),
        ("leaves_out_the_end", "ordinary", {"llama-3-1", "glm-4.5-2"}),
        ("masks_padding", "eos_is_pad", {"phi-3-1", "llama-2-2"}),
        ("renders_in_one_row", "thought", {"qwen3-2", "deepseek-r1-2"}),
        ("doubles_the_end", "ordinary", {"chatml-2", "glm-4.5-2", "llama-2-2"}),
        ("drops_a_newline", "ordinary", {"chatml-2", "qwen3-2", "gemma-2", "zephyr-2"}),
    ],
)
def test_each_bug_is_red_in_its_check(bug, trap, among):
    assert among <= red(bug, trap)[trap]


def test_padding_with_eos_is_only_red_where_the_padding_ends_an_answer():
    assert red("masks_padding", "ordinary")["ordinary"] == {
        f"{name}-{turns}" for name in ("deepseek-r1", "smollm2", "zephyr") for turns in (1, 2)
    }
