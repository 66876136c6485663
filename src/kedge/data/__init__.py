"""Data records: reading, chat templates, tokenization and batching."""

from kedge.data.chat import TLDR_ENDING, PromptForm, prompt_form
from kedge.data.preview import DataUsage, Preview
from kedge.data.prompts import Mixture, PromptStream, Split, room_for_prompt, split_eval
from kedge.data.readers import read_rows
from kedge.data.records import (
    Comparison,
    Demonstration,
    Prompt,
    Ranking,
    Table,
)
from kedge.data.sources import Source, Sources, rows_of
from kedge.data.tokens import (
    EncodedExample,
    Rendered,
    encode_completion,
    encode_example,
    encode_prompt,
    encode_text,
    end_with_eos,
)
from kedge.data.truncation import tldr_response

__all__ = [
    "TLDR_ENDING",
    "Comparison",
    "DataUsage",
    "Demonstration",
    "EncodedExample",
    "Mixture",
    "Preview",
    "Prompt",
    "PromptForm",
    "PromptStream",
    "Ranking",
    "Rendered",
    "Source",
    "Sources",
    "Split",
    "Table",
    "encode_completion",
    "encode_example",
    "encode_prompt",
    "encode_text",
    "end_with_eos",
    "prompt_form",
    "read_rows",
    "room_for_prompt",
    "rows_of",
    "split_eval",
    "tldr_response",
]
