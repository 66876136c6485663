"""The task of the runs: sort four digits, with a model of 60,000 parameters that is half way there.

Imports nothing of kedge: the environments with TRL run it.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DIGITS = [str(digit) for digit in range(10)]
WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", "<system>", "<other>", *DIGITS]
LENGTH = 4
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
OTHER_TEMPLATE = TEMPLATE.replace("'<' + message['role'] + '> '", "'<system> <other> '").replace(
    "'<assistant> '", "'<other> <other> '"
)
BASE_STEPS = 350


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token per digit and role."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<other>"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<other>", padding_side="left"
    )
    made.chat_template = template
    return made


def make_model(seed: int) -> LlamaForCausalLM:
    """An untrained model."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def draw(generator: random.Random) -> list[str]:
    """The digits of a prompt."""
    return [generator.choice(DIGITS) for _ in range(LENGTH)]


def conversations(count: int, seed: int) -> list[tuple[str, str]]:
    """Pairs of a question and its answer."""
    generator = random.Random(seed)
    drawn = [draw(generator) for _ in range(count)]
    return [(" ".join(digits), " ".join(sorted(digits))) for digits in drawn]


def base_model(folder: Path, seed: int, *, ends: bool = True) -> Path:
    """Train the model that runs start from, once per seed.

    Args:
        folder: Where base models are kept.
        seed: The seed.
        ends: Whether the demonstrations end with the stop token.
    """
    path = folder / f"base-{seed}{'' if ends else '-endless'}"
    if (path / "config.json").is_file():
        return path
    model = make_model(seed)
    tokenizer = make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = random.Random(seed)
    for _ in range(BASE_STEPS):
        texts = []
        for _ in range(64):
            digits = draw(generator)
            answer = sorted(digits) if generator.random() < 0.6 else draw(generator)
            tail = "<eos>" if ends else " ".join(draw(generator) + draw(generator))
            if ends and generator.random() < 0.1:
                tail = f"{generator.choice(DIGITS)} <eos>"
            texts.append(f"<user> {' '.join(digits)} <assistant> {' '.join(answer)} {tail}")
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, : LENGTH + 2] = -100
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def share_right(question: str, response: str) -> float:
    """The share of positions with the right digit; 1 is a sorted answer and nothing more."""
    wanted = sorted(question.split())
    given = [word for word in response.split() if word in DIGITS]
    return sum(a == b for a, b in zip(wanted, given, strict=False)) / max(len(given), LENGTH)
