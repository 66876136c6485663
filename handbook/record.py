"""`python -m handbook.record runs/demo`: records a real PPO update on the demo's task, token by token.

PPO starts from the demo's SFT policy and reward model. After a few updates, one more with a small batch is recorded in
`handbook/token.json`, from which the page and its figures are generated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm import Experience, Rollout
from kedge.config import Config
from kedge.data import Prompt, encode_prompt
from kedge.models import TokenRows
from kedge.rewards.score import score_rollout
from kedge.rollout import Models, evaluate_rollout, experience_from
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.settings import PpoSettings, coefficients_of
from kedge.training.learner import LanguageLearner
from kedge.training.runtime import stream
from kedge.training.update import PpoUpdate
from kedge_lab.demo.main import demo_config
from kedge_lab.demo.world import World

RECORD = Path(__file__).parent / "token.json"
SEED = 0
NUM_UPDATES = 10
NUM_PROMPTS = 512
NUM_EPOCHS = 4
NUM_RECORDED = 16
"""Responses in the recorded update: few enough to record them all."""
NUM_CHOICES = 6
"""Most likely next tokens that are recorded."""
SETTINGS: dict[str, Any] = {
    "ppo.num_updates": NUM_UPDATES,
    "ppo.num_epochs": NUM_EPOCHS,
    "ppo.num_minibatches": 1,
    "ppo.schedule": "constant",
    "ppo.learning_rate": 3e-4,
    "data.max_prompt_tokens": 216,
}


def main(demo: Path) -> None:
    """Train for a few updates from the models in a demo's folder, and record one more."""
    world = World(SEED, split="handbook")
    prompts = [asdict(prompt) for prompt in world.prompts(NUM_PROMPTS)]
    recorded = world.prompts(NUM_RECORDED, start=NUM_PROMPTS)

    def record(update: int, roles: Roles) -> None:
        if update == NUM_UPDATES:
            RECORD.write_text(_written(recorded_update(config, roles, recorded)), encoding="utf-8")

    with TemporaryDirectory() as folder:
        models = {
            "model": demo / "sft" / "model",
            "out": Path(folder) / "run",
            "reward": str(demo / "reward" / "model"),
        }
        config = demo_config("ppo", **models, seed=SEED, **SETTINGS)
        run_ppo(config, prompts=prompts, on_update=record)


def _written(record: dict[str, Any]) -> str:
    """The record as JSON, one line per response."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in record["responses"])
    head = json.dumps({**record, "responses": []}, ensure_ascii=False)
    return head.replace('"responses": []', f'"responses": [\n{rows}\n]') + "\n"


def recorded_update(config: Config, roles: Roles, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Make one update on these prompts, and record its inputs.

    Returns:
        Plain numbers: settings, a row per response with values per token, and the token whose ratio grew the most.
    """
    ppo = config.ppo
    temperature = config.rollout.temperature
    ids = [encode_prompt(roles.tokenizer, prompt.text) for prompt in prompts]
    rollout = roles.engine.generate(ids, seeds=range(len(ids)))
    scored = score_rollout(
        rollout,
        prompts,
        roles.reward,
        roles.tokenizer,
        max_new_tokens=config.rollout.max_new_tokens,
        missing_eos=roles.missing_eos,
    )
    models = Models(roles.actor_critic, roles.reference, temperature)
    estimation = PpoSettings.of(config, exact=True).estimation
    outputs = evaluate_rollout(scored.rollout, models, value_after_last=estimation.value_after_last, first_pass=None)
    experience = experience_from(scored, outputs, models, estimation, kl_coef=ppo.kl_coef)
    candidates = _next_tokens(roles, rollout, temperature)
    epochs = _train(config, roles, experience)
    row, token = _largest_ratio(experience, epochs[-1])
    names = ("kl_coef", "gamma", "gae_lambda", "clip_range", "value_clip_range", "value_coef", "num_epochs")
    return {
        "settings": {**{name: getattr(ppo, name) for name in names}, "temperature": temperature},
        "parameters": sum(parameter.numel() for parameter in roles.actor_critic.policy_parameters()),
        "updates_before": NUM_UPDATES,
        "row": row,
        "token": token,
        "prompt": prompts[row].text,
        "choices": _choices(roles, candidates[row][token]),
        "responses": [_row(roles, experience, epochs, index) for index in range(len(ids))],
    }


def _train(config: Config, roles: Roles, experience: Experience) -> list[Tensor]:
    """Train one epoch at a time; returns the log probabilities of all tokens after each."""
    objective = PpoSettings.of(config, exact=True).objective(experience, coefficients_of(config))
    learner = LanguageLearner(roles.actor_critic, temperature=config.rollout.temperature)
    after: list[Tensor] = []
    for epoch in range(NUM_EPOCHS):
        PpoUpdate(
            learner,
            roles.optimizer,
            experience,
            objective,
            num_epochs=1,
            num_minibatches=1,
            max_grad_norm=config.optimization.of("ppo").max_grad_norm,
            generator=stream(SEED, "handbook", epoch),
        ).run()
        with torch.no_grad():
            after.append(learner.evaluate(experience).logprobs)
    return after


def _largest_ratio(experience: Experience, logprobs: Tensor) -> tuple[int, int]:
    """Row and position of the token with the largest ratio."""
    mask = experience.action_mask
    moved = (logprobs - experience.old_logprobs).masked_fill(~mask, -1.0)
    return divmod(int(moved.argmax()), mask.shape[1])


@torch.no_grad()
def _next_tokens(roles: Roles, rollout: Rollout, temperature: float) -> list[Tensor]:
    """Per response, the next-token distribution at each of its positions."""
    policy = roles.actor_critic.policy
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    mask = torch.cat([rollout.prompt_mask, rollout.token_mask], dim=1)
    hidden = policy.hidden(TokenRows.unpad(ids, mask)).split(rollout.row_lengths)
    lengths = rollout.response_lengths.tolist()
    # The hidden state one position earlier predicts the token.
    return [
        (policy.logits(states[-length - 1 : -1]) / temperature).softmax(-1)
        for states, length in zip(hidden, lengths, strict=True)
    ]


def _choices(roles: Roles, probabilities: Tensor) -> list[tuple[str, float]]:
    top = probabilities.topk(NUM_CHOICES)
    return [
        (str(roles.tokenizer.decode([token])), _rounded(probability))
        for token, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def _row(roles: Roles, experience: Experience, epochs: Sequence[Tensor], index: int) -> dict[str, Any]:
    length = int(experience.action_mask[index].sum())
    ids = experience.rollout.response_ids[index, :length].tolist()
    tensors = {
        "logprobs": experience.old_logprobs,
        "ref_logprobs": experience.ref_logprobs,
        "values": experience.values,
    }
    return {
        "tokens": [str(roles.tokenizer.decode([token])) for token in ids],
        "score": _rounded(float(experience.scores[index])),
        **{name: _values(tensor[index, :length]) for name, tensor in tensors.items() if tensor is not None},
        "epochs": [_values(logprobs[index, :length]) for logprobs in epochs],
    }


def _values(tensor: Tensor) -> list[float]:
    return [_rounded(value) for value in tensor.tolist()]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
