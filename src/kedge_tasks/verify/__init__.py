"""Verifiers: reward functions that check a response against its prompt's row, and give a reason.

    kedge ppo --reward kedge_tasks.verify:gsm8k …

    response ─▶ final answer ─▶ right? ─▶ Verdict(1.0, "right"), or Verdict(0.0, "wrong value")

A verifier gives 1 for a right response and 0 for a wrong one, with one of a few reasons; some also give partial credit.
It reads its row by columns such as `answer`; a mistake in a row is found before the run.

answers: numbers and mathematics. texts: choices, matches, patterns, tags, JSON. instructions: rules for the text.
programs: code against tests. generated: the tasks of reasoning-gym. checking: what they share. wording: how responses
say "the answer is" and "not".
"""

from __future__ import annotations

from kedge_tasks.verify.answers import gsm8k, gsm8k_strict, math, number
from kedge_tasks.verify.generated import reasoning_gym
from kedge_tasks.verify.instructions import instruction_text, instructions, instructions_partial
from kedge_tasks.verify.programs import code, code_stdio
from kedge_tasks.verify.texts import choice, exact, f1, json_schema, normalized, pattern, tags

__all__ = [
    "choice",
    "code",
    "code_stdio",
    "exact",
    "f1",
    "gsm8k",
    "gsm8k_strict",
    "instruction_text",
    "instructions",
    "instructions_partial",
    "json_schema",
    "math",
    "normalized",
    "number",
    "pattern",
    "reasoning_gym",
    "tags",
]
