"""Policies with known output: one letter with a known probability, independent of the prompt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_causal_lm, tiny_tokenizer

CERTAIN = 60.0


def save_speaker(
    folder: Path, letter: str = "e", *, lead: float = CERTAIN, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """A policy whose next token is `letter` with e^lead times the probability of each other token.

    All tokens are embedded alike and every layer adds 0, so that the last hidden state is a row of ones.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    token = tokenizer.convert_tokens_to_ids(letter)
    model = tiny_causal_lm(vocab_size=len(tokenizer))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
            elif "embed_tokens" in name or "norm" in name:
                weight.fill_(1.0)
        model.get_output_embeddings().weight[token] = lead / model.config.hidden_size
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_kedge(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a subprocess."""
    return subprocess.run(
        [sys.executable, "-m", "kedge", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
