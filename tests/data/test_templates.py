from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.data import encode_prompt, read_rows, tldr_response, tokens
from kedge.data.records import RowError
from kedge.data.truncation import render_tldr, truncate_prompt
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer(add_bos=True)
HEAD, TAIL = "SUBREDDIT: r/boats\n\nTITLE: Help\n\nPOST: ", "\n\nTL;DR:"


def num_tokens(text: str) -> int:
    return len(encode_prompt(TOKENIZER, text))


def cut_slowly(post: str, max_tokens: int) -> str | None:
    """As in the paper: drop everything after the last line break until the prompt fits."""
    post = post.strip()
    while num_tokens(HEAD + post + TAIL) > max_tokens:
        if "\n" not in post:
            return None
        post = post[: post.rindex("\n")].rstrip()
    return HEAD + post + TAIL


def test_the_published_format():
    assert render_tldr("boats", "Help", "It broke.", TOKENIZER) == HEAD + "It broke." + TAIL
    assert render_tldr("r/boats", "Help", "\n It broke.\n", TOKENIZER) == HEAD + "It broke." + TAIL
    assert tldr_response("\tIt broke. ") == " It broke."


def test_a_long_post_is_cut_at_a_paragraph():
    kept = "The tide went out.\n\nThe crew hauled."
    post = kept + "\n\nThe rope broke and so did the anchor."
    limit = num_tokens(HEAD + kept + TAIL)
    assert render_tldr("boats", "Help", post, TOKENIZER, limit) == HEAD + kept + TAIL
    assert render_tldr("boats", "Help", post, TOKENIZER, limit - 1) == HEAD + "The tide went out." + TAIL
    assert render_tldr("boats", "Help", post, TOKENIZER, num_tokens(HEAD + post + TAIL)) == HEAD + post + TAIL
    with pytest.raises(RowError, match="first paragraph alone"):
        render_tldr("boats", "Help", post, TOKENIZER, num_tokens(HEAD + "The tide went out." + TAIL) - 1)


def test_a_post_that_fits_is_encoded_once():
    with mock.patch("kedge.data.tokens._encode", wraps=tokens._encode) as encode:
        render_tldr("boats", "Help", "The rope broke.", TOKENIZER, 200)
    assert encode.call_count == 1


@settings(max_examples=50, deadline=None)
@given(
    paragraphs=st.lists(st.text("abc .\n", min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=8),
    max_tokens=st.integers(20, 120),
)
def test_bisection_cuts_where_the_paper_does(paragraphs, max_tokens):
    post = "\n\n".join(paragraphs)
    expected = cut_slowly(post, max_tokens)
    if expected is None:
        with pytest.raises(RowError):
            render_tldr("boats", "Help", post, TOKENIZER, max_tokens)
    else:
        assert render_tldr("boats", "Help", post, TOKENIZER, max_tokens) == expected


def test_an_oversized_text_is_not_encoded_whole():
    post = "The tide went out.\n\n" * 5_000
    with mock.patch("kedge.data.tokens._encode", wraps=tokens._encode) as encode:
        text = render_tldr("boats", "Help", post, TOKENIZER, 200)
        start = truncate_prompt(TOKENIZER, post, 200, "keep_start")
        end = truncate_prompt(TOKENIZER, post, 200, "keep_end")
    assert text == cut_slowly("The tide went out.\n\n" * 30, 200)
    assert post.startswith(start)
    assert post.endswith(end)
    assert all(num_tokens(cut) in (199, 200) for cut in (start, end))
    assert max(len(call.args[1]) for call in encode.call_args_list) < len(post) / 5


def test_a_post_whose_first_paragraph_is_too_long_is_a_bad_row():
    row = {"subreddit": "boats", "title": "Help", "post": "sea " * 200}
    table = read_rows(
        [{**row, "post": "sea"}, row],
        "prompts",
        tokenizer=TOKENIZER,
        template="tldr",
        max_prompt_tokens=100,
        max_rejected_fraction=0.5,
    )
    assert [rejection.line for rejection in table.rejected] == [2]
    assert "the post is too long" in table.rejected[0].reason
