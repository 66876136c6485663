import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.data import encode_completion, encode_example, encode_prompt, encode_text
from kedge.data.records import RowError
from kedge.data.tokens import pad_left
from kedge_base.errors import ModelError
from tests.tiny import tiny_sentencepiece_tokenizer, tiny_tokenizer

PAD, BOS, EOS = 0, 1, 2
PLAIN, WITH_BOS, SENTENCEPIECE = tiny_tokenizer(), tiny_tokenizer(add_bos=True), tiny_sentencepiece_tokenizer()
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=30)


def test_bos_is_added_only_if_the_tokenizer_adds_it():
    assert encode_prompt(PLAIN, "The sea")[0] != BOS
    assert encode_prompt(WITH_BOS, "The sea") == [BOS, *encode_prompt(PLAIN, "The sea")]
    assert encode_prompt(SENTENCEPIECE, "The sea") == SENTENCEPIECE.encode("The sea")


def test_a_rendered_bos_is_not_doubled():
    assert encode_prompt(WITH_BOS, "<bos>The sea").count(BOS) == 1
    assert encode_prompt(WITH_BOS, "<bos>The sea") == encode_prompt(WITH_BOS, "The sea")


def test_an_empty_prompt_is_bos_or_nothing():
    assert encode_prompt(WITH_BOS, "") == [BOS]
    assert encode_prompt(PLAIN, "") == []


@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_BOS, SENTENCEPIECE])
def test_a_completion_has_no_bos_and_one_eos(tokenizer):
    ids = encode_completion(tokenizer, " the tide")
    assert BOS not in ids
    assert ids.count(EOS) == 1 == ids[::-1].index(EOS) + 1
    assert encode_completion(tokenizer, " the tide<eos>") == ids
    assert encode_completion(tokenizer, " the tide", eos=False) == ids[:-1]


@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_BOS, SENTENCEPIECE])
@given(prompt=texts, completion=texts)
def test_the_halves_decode_to_the_whole_text(tokenizer, prompt, completion):
    halves = encode_example(tokenizer, prompt, completion)
    decoded = tokenizer.decode([*halves.prompt, *halves.completion], skip_special_tokens=True)
    # SentencePiece does not distinguish "▁" from a space; all other characters survive.
    whole = prompt + completion
    assert decoded == (whole.replace("▁", " ") if tokenizer is SENTENCEPIECE else whole)


@pytest.mark.parametrize("completion", ["\nlay", "\n\nlay", "\n\n\nlay", " lay", "lay", ".lay", ". lay"])
def test_a_completion_begins_as_it_is_written(completion):
    whole = encode_example(SENTENCEPIECE, "The boat", completion)
    decoded = SENTENCEPIECE.decode([*whole.prompt, *whole.completion], skip_special_tokens=True)
    assert decoded == f"The boat{completion}"


def test_a_text_without_prompt_is_encoded_as_the_start_of_a_text():
    example = encode_example(SENTENCEPIECE, "", "Once upon")
    assert [*example.prompt, *example.completion] == [*SENTENCEPIECE.encode("Once upon"), EOS]
    assert example.prompt == [BOS]


def test_a_tokenizer_without_eos_is_named():
    tokenizer = tiny_tokenizer()
    for missing in ("", None):
        tokenizer.eos_token = missing
        with pytest.raises(ModelError, match="no end-of-sequence token"):
            encode_completion(tokenizer, "a")
    assert encode_completion(tokenizer, "a", eos=False) == encode_prompt(PLAIN, "a")


@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_BOS, SENTENCEPIECE])
@given(parts=st.lists(st.sampled_from(["<pad>", "<pad", "pad>", "<", " ", "a", "é"]), max_size=8))
def test_the_text_of_the_padding_token_is_encoded_as_text(tokenizer, parts):
    text = "".join(parts)
    ids = encode_text(tokenizer, text)
    assert PAD not in ids
    assert tokenizer.decode(ids) == text
    halves = encode_example(tokenizer, text, text)
    assert PAD not in [*halves.prompt, *halves.completion]
    assert tokenizer.decode([*halves.prompt, *halves.completion], skip_special_tokens=True) == text + text
    if "<pad>" not in text:
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_the_padding_token_as_text_by_hand():
    # transformers' own way to read all special tokens as text; the others keep their meaning here.
    assert encode_text(PLAIN, "a<pad>b") == PLAIN.encode("a<pad>b", split_special_tokens=True)
    assert encode_text(PLAIN, "a<eos><pad>b") == [
        *PLAIN.encode("a"), EOS, *PLAIN.encode("<"), *PLAIN.encode("pad>b", split_special_tokens=True)
    ]  # fmt: skip


def test_a_padding_token_that_cannot_be_avoided_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "."
    for encode in (encode_prompt, encode_completion, encode_text):
        with pytest.raises(RowError, match=r"reads a part of the text as its padding token .\."):
            encode(tokenizer, "The sea.")


def test_padding_by_hand():
    ids, mask = pad_left([[5, 6, 7], [8]], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert [each.shape for each in pad_left([[], []], 0)] == [(2, 0), (2, 0)]
    assert [each.shape for each in pad_left([], 0)] == [(0, 0), (0, 0)]
    assert pad_left([[], [4]], 9)[0].tolist() == [[9], [4]]
