"""The pieces of a sequence join to its text, whatever the tokenizer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kedge.data import encode_prompt
from kedge.data.tokens import token_pieces, turn_pieces
from tests.tiny import TEXTS, tiny_sentencepiece_tokenizer, tiny_tokenizer


def tiny_wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """BERT's kind: words are split at spaces and punctuation, "##" marks the continuation of a word."""
    characters = sorted({character for text in TEXTS for character in text if not character.isspace()})
    words = ["<unk>", "The", "boat", "##at", "the", "##er", "rope"]
    vocab = {word: at for at, word in enumerate([*words, *characters, *(f"##{each}" for each in characters)])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS: dict[str, Any] = {
    "byte-level": tiny_tokenizer(),
    "sentencepiece": tiny_sentencepiece_tokenizer(),
    "wordpiece": tiny_wordpiece_tokenizer(),
}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


class Counting:
    """A tokenizer that counts the tokens it has decoded."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


@kinds
def test_words_keep_their_spaces(kind):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("The boat rope broke", add_special_tokens=False)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == "The boat rope broke"
    assert [piece for piece in pieces if " " in piece]
    assert all(piece.rfind(" ") <= 0 for piece in pieces), "a space belongs to the word that it precedes"


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_character_belongs_to_the_last_of_its_tokens(kind):
    tokenizer = TOKENIZERS[kind]
    pieces = token_pieces(tokenizer, tokenizer.encode("a☂b", add_special_tokens=False))
    assert [piece.strip() for piece in pieces][-5:] == ["a", "", "", "☂", "b"]


@kinds
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
def test_the_pieces_of_a_text_join_to_it(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@kinds
@given(data=st.data())
def test_the_pieces_of_any_tokens_join_to_their_text(kind, data):
    """Sampled tokens: special ones in the middle, bytes that are no character."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=150))
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@kinds
@given(data=st.data())
def test_the_turns_of_two_sides_join_to_the_text(kind, data):
    tokenizer = TOKENIZERS[kind]
    said = data.draw(st.lists(st.tuples(st.integers(0, len(tokenizer) - 1), st.booleans()), max_size=60))
    ids, own = [token for token, _ in said], [is_own for _, is_own in said]
    pieces, foreign = turn_pieces(tokenizer, ids, own)
    assert len(pieces) == sum(own)
    places = [at for at, _ in foreign]
    assert places == sorted(set(places))
    told = dict(foreign)
    joined = "".join(told.get(at, "") + piece for at, piece in enumerate([*pieces, ""]))
    assert joined == tokenizer.decode(ids)
    assert set(places) == {sum(own[:at]) for at, is_own in enumerate(own) if not is_own}


@kinds
@pytest.mark.parametrize("text", ["The boat lay at anchor. ", "日本語é", "☂"])
def test_long_texts_take_linear_work_and_lose_no_place(kind, text):
    tokenizer: Any = Counting(TOKENIZERS[kind])
    ids = encode_prompt(TOKENIZERS[kind], text * 300)
    pieces = token_pieces(tokenizer, ids)
    assert "".join(pieces) == TOKENIZERS[kind].decode(ids)
    assert tokenizer.decoded < 25 * len(ids)
    assert max(map(len, pieces)) <= len("<unk>") + 1


def test_bytes_that_are_no_character_take_linear_work():
    """A stray byte turns all bytes around it into replacement characters, which no window shows."""
    tokenizer: Any = Counting(TOKENIZERS["sentencepiece"])
    run = [TOKENIZERS["sentencepiece"].convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é".encode()]
    ids = [*run * 1000, run[0]]
    pieces = token_pieces(tokenizer, ids)
    assert "".join(pieces) == TOKENIZERS["sentencepiece"].decode(ids) == "\ufffd" * len(ids)
    assert tokenizer.decoded < 100 * len(ids)
