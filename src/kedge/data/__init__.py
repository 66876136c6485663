"""Records and how they are read, templated, tokenised and batched."""

from kedge.data.records import Comparison, Demonstration, Prompt, Ranking, Record
from kedge.data.tokens import (
    EncodedExample,
    Padded,
    encode_completion,
    encode_example,
    encode_prompt,
    pad_left,
    pad_right,
)

__all__ = [
    "Comparison",
    "Demonstration",
    "EncodedExample",
    "Padded",
    "Prompt",
    "Ranking",
    "Record",
    "encode_completion",
    "encode_example",
    "encode_prompt",
    "pad_left",
    "pad_right",
]
