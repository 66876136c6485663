# pyright: reportMissingImports=false
"""Makes runs of TRL's trainers, healthy ones and with injected faults: run by an environment with TRL, without kedge.

    bench/.newer-peer/bin/python -m bench.abroad.make grpo rloo sft reward --out runs/abroad --seeds 0 1 2 3
    bench/.peer/bin/python -m bench.abroad.make ppo --out runs/abroad --seeds 0 1 2 3

A run that is there is not made again; faults that the log cannot show are not made unless named. Each leaves what TRL
leaves: `trainer_state.json` and `training_args.bin`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_DISABLED"] = "true"

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from bench.abroad.cases import CASES
from bench.abroad.task import (
    DIGITS,
    OTHER_TEMPLATE,
    WORDS,
    base_model,
    conversations,
    draw,
    make_tokenizer,
    share_right,
)

disable_progress_bars()
torch.set_num_threads(1)
GENERATIONS = 8
BATCH = 64
Score = Callable[[str, str], float]


def _by_length(question: str, response: str) -> float:
    return len(response.split()) / 12


def _question(prompt: Any) -> str:
    return prompt[-1]["content"] if isinstance(prompt, list) else prompt


def reward_of(case: str) -> Score:
    """The score of a case, as a function of question and response."""
    if case == "constant":
        return lambda question, response: 1.0
    if case == "length":
        return _by_length
    if case in ("sign", "sign_judged"):
        return lambda question, response: -share_right(question, response)
    if case == "healthy_exact":
        return lambda question, response: float(share_right(question, response) == 1)
    return share_right


def _completion(given: Any) -> str:
    return given[-1]["content"] if isinstance(given, list) else given


def _function(score: Score, name: str) -> Callable[..., list[float]]:
    def scores(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        return [score(_question(p), _completion(c)) for p, c in zip(prompts, completions, strict=True)]

    scores.__name__ = name
    return scores


class _Negated:
    """Multiplies advantages by −1: a sign error in a trainer."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        output["advantages"] = -output["advantages"]
        return output


RATES = {"lr10": 10.0, "lr1000": 1000.0, "lr001": 0.01}


def _policy_settings(case: str, rate: float, *, beta: str) -> dict[str, Any]:
    """Settings that GRPO and RLOO share."""
    generation: dict[str, Any] = {}
    if case == "one_token":
        generation = {"suppress_tokens": [number for number in range(len(WORDS)) if number != len(WORDS) - 1]}
    settings = {
        "learning_rate": rate * RATES.get(case, 1.0),
        "num_generations": GENERATIONS,
        "per_device_train_batch_size": BATCH,
        "max_completion_length": 3 if case == "truncated" else 12,
        "max_steps": 45,
        "temperature": 0.01 if case == "equal" else 1.0,
        "generation_kwargs": generation or None,
        "lr_scheduler_type": "constant",
    }
    if beta:
        settings["beta"] = float(beta)
    if case == "healthy_epochs":
        settings["num_iterations"] = 2
    if case in ("sign_judged", "healthy_judged"):
        settings["reward_weights"] = [1.0, 0.0]
    return settings


def _train_policy(trainer_name: str, case: str, seed: int, out: Path, bases: Path) -> Any:
    import trl

    config_class, trainer_class, rate = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer, 3e-4),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer, 6e-4),
    }[trainer_name]
    beta = {"beta0": "0.0", "beta10": "10.0", "healthy_kl": "0.04"}.get(case, "")
    args = config_class(**_policy_settings(case, rate, beta=beta), output_dir=str(out), seed=seed, **COMMON)
    base = base_model(bases, seed, ends=case != "no_eos")
    questions = conversations(4096, seed + 100)
    rows = [{"prompt": [{"role": "user", "content": question}]} for question, _ in questions]
    functions = [_function(reward_of(case), "score")]
    if case in ("sign_judged", "healthy_judged"):
        functions.append(_function(share_right, "judge"))
    made: Any = type("Trainer", (_Negated, trainer_class), {}) if case == "gradient_sign" else trainer_class
    return made(
        model=AutoModelForCausalLM.from_pretrained(base),
        reward_funcs=functions,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(OTHER_TEMPLATE) if case == "template" else make_tokenizer(),
    )


class _Judge(torch.nn.Module):
    """A program with the interface of TRL's reward models."""

    base_model_prefix = "backbone"

    def __init__(self, score: Score) -> None:
        super().__init__()
        self._score = score
        self._ids = torch.zeros(0)

    def backbone(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(hidden_states=[input_ids])

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        scores = []
        for row in ids.tolist():
            words = [WORDS[number] for number in row]
            asked = words.index("<assistant>") if "<assistant>" in words else len(words) - 1
            question = " ".join(word for word in words[:asked] if word in DIGITS)
            answer = words[asked + 1 :]
            ended = answer.index("<eos>") if "<eos>" in answer else len(answer)
            response = " ".join(word for word in answer[:ended] if word != "<pad>")
            scores.append(self._score(question, response))
        return torch.tensor(scores)[:, None, None].expand(-1, ids.shape[1], 1)


def _train_ppo(case: str, seed: int, out: Path, bases: Path) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = make_tokenizer(OTHER_TEMPLATE) if case == "template" else make_tokenizer()
    base = base_model(bases, seed, ends=case != "no_eos")
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_pretrained(base)
    if case == "one_token":
        policy.generation_config.suppress_tokens = list(range(len(WORDS) - 1))
    values = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    args = PPOConfig(
        output_dir=str(out),
        learning_rate=1e-4 * RATES.get(case, 1.0),
        per_device_train_batch_size=BATCH,
        num_mini_batches=2,
        num_ppo_epochs=2 if case == "healthy_epochs" else 4,
        total_episodes=BATCH * 30,
        response_length=3 if case == "truncated" else 12,
        stop_token="eos",
        missing_eos_penalty=1.0 if case in ("healthy", "truncated", "no_eos") else None,
        temperature=0.01 if case == "equal" else 1.0,
        kl_coef={"beta0": 0.0, "beta10": 10.0}.get(case, 0.05),
        num_sample_generations=0,
        seed=seed,
        lr_scheduler_type="constant",
        **COMMON,
    )
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question, _ in conversations(4096, seed + 100)
    ]
    rows = [{"input_ids": tokenizer(str(text))["input_ids"]} for text in texts]
    score = reward_of(case)
    made = PPOTrainer
    if case == "gradient_sign":
        made = _negated_ppo()
    return made(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(base),
        reward_model=_Judge(score),
        value_model=values,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:BATCH]),
    )


def _negated_ppo() -> Any:
    """PPO with advantages of the wrong sign, while it trains."""
    from trl.experimental.ppo import ppo_trainer

    class Negated(ppo_trainer.PPOTrainer):
        def train(self) -> None:
            whiten = ppo_trainer.masked_whiten
            ppo_trainer.masked_whiten = lambda *given, **named: -whiten(*given, **named)
            try:
                super().train()
            finally:
                ppo_trainer.masked_whiten = whiten

    return Negated


def _pairs(case: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(seed)
    for question, answer in conversations(count, seed):
        wrong = " ".join(draw(generator))
        chosen, rejected = (answer, wrong) if case != "sign" else (wrong, answer)
        if case == "constant":
            rejected = chosen
        if case == "random_labels" and generator.random() < 0.5:
            chosen, rejected = rejected, chosen
        if case == "length":
            chosen, rejected = answer + " " + wrong, wrong
        ask = [{"role": "user", "content": question}]
        yield {
            "chosen": [*ask, {"role": "assistant", "content": chosen}],
            "rejected": [*ask, {"role": "assistant", "content": rejected}],
        }


def _train_reward(case: str, seed: int, out: Path, bases: Path) -> Any:
    import trl

    base = base_model(bases, seed)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    args = trl.RewardConfig(
        output_dir=str(out),
        learning_rate=1e-3 * RATES.get(case, 1.0),
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        max_steps=60,
        eval_strategy="no" if case == "healthy_no_eval" else "steps",
        eval_steps=12,
        seed=seed,
        **COMMON,
    )
    return trl.RewardTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(list(_pairs(case, 2048, seed + 100))),
        eval_dataset=None if case == "healthy_no_eval" else Dataset.from_list(list(_pairs(case, 256, seed + 200))),
        processing_class=make_tokenizer(OTHER_TEMPLATE) if case == "template" else make_tokenizer(),
    )


def _messages(case: str, count: int, seed: int) -> list[dict[str, Any]]:
    pairs = conversations(count, seed)
    if case == "one_token":
        pairs = [(question, "7 7 7 7") for question, _ in pairs]
    if case == "no_eos":  # as text, to which nothing is added
        return [{"text": f"<user> {question} <assistant> {answer} {answer} {answer}"} for question, answer in pairs]
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    ]


def _train_sft(case: str, seed: int, out: Path, bases: Path) -> Any:
    import trl

    base = base_model(bases, seed)
    small = case == "overfit"
    args = trl.SFTConfig(
        output_dir=str(out),
        learning_rate=1e-3 * RATES.get(case, 1.0) * (3 if small else 1),
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        max_steps=120 if small else 60,
        eval_strategy="no" if case == "healthy_no_eval" else "steps",
        eval_steps=12,
        max_length=4 if case == "truncated" else 64,
        seed=seed,
        **COMMON,
    )
    train = _messages(case, 64 if small else 2048, seed + 100)
    return trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=args,
        train_dataset=Dataset.from_list(train),
        eval_dataset=None if case == "healthy_no_eval" else Dataset.from_list(_messages(case, 256, seed + 200)),
        processing_class=make_tokenizer(OTHER_TEMPLATE) if case == "template" else make_tokenizer(),
    )


COMMON: dict[str, Any] = {
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
MAKERS: dict[str, Callable[[str, int, Path, Path], Any]] = {
    "grpo": lambda *given: _train_policy("grpo", *given),
    "rloo": lambda *given: _train_policy("rloo", *given),
    "ppo": _train_ppo,
    "sft": _train_sft,
    "reward": _train_reward,
}


def make_run(trainer: str, case: str, seed: int, out: Path) -> None:
    """Train, and leave the log and the settings in a folder."""
    folder = out / f"{trainer}-{case}-{seed}"
    if (folder / "trainer_state.json").is_file():
        return
    part = out / "part"
    shutil.rmtree(part, ignore_errors=True)
    started = time.process_time()
    made = MAKERS[trainer](case, seed, part, out / "bases")
    gc.freeze()  # TRL's PPO collects garbage after every step
    try:
        made.train()
    except (RuntimeError, ValueError, IndexError) as error:  # a policy of NaN cannot be sampled from
        print(f"{folder.name} ended with {type(error).__name__}: {error}"[:200])
    made.state.save_to_json(str(part / "trainer_state.json"))
    torch.save(made.args, part / "training_args.bin")
    part.rename(folder)
    print(
        f"{folder.name}: {time.process_time() - started:.0f} s of a core, {len(made.state.log_history)} rows",
        flush=True,
    )


def main() -> None:
    """Make the runs that are named and not there yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trainers", nargs="+", choices=list(MAKERS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", help="Cases; by default healthy ones and visible faults.")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        for trainer in given.trainers:
            for case in CASES:
                asked = case.name in given.only if given.only else case.is_visible or case.is_healthy
                if case.trainer == trainer and asked:
                    make_run(trainer, case.name, seed, given.out)


if __name__ == "__main__":
    sys.exit(main())
