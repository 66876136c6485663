"""Records and how they are read, templated, tokenised and batched."""

from kedge.data.collate import (
    ComparisonBatch,
    DemonstrationBatch,
    RankingBatch,
    collate_comparisons,
    collate_demonstrations,
    collate_rankings,
)
from kedge.data.prompts import PromptStream
from kedge.data.readers import read_comparisons, read_demonstrations, read_prompts
from kedge.data.records import Comparison, Demonstration, Prompt, Ranking, Record
from kedge.data.rejections import Rejection, Table, check_rejections, write_rejections
from kedge.data.sources import Source, Sources
from kedge.data.splitting import Split, split_eval
from kedge.data.templates import render_tldr, tldr_response
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
    "ComparisonBatch",
    "Demonstration",
    "DemonstrationBatch",
    "EncodedExample",
    "Padded",
    "Prompt",
    "PromptStream",
    "Ranking",
    "RankingBatch",
    "Record",
    "Rejection",
    "Source",
    "Sources",
    "Split",
    "Table",
    "check_rejections",
    "collate_comparisons",
    "collate_demonstrations",
    "collate_rankings",
    "encode_completion",
    "encode_example",
    "encode_prompt",
    "pad_left",
    "pad_right",
    "read_comparisons",
    "read_demonstrations",
    "read_prompts",
    "render_tldr",
    "split_eval",
    "tldr_response",
    "write_rejections",
]
