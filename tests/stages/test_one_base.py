"""Several roles on one base: they share its weights, and each computes what it would compute alone."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import kedge
from kedge.config import config_from_settings
from kedge.data import encode_example
from kedge.models import AdapterSettings, load_language_model, load_scalar_model, load_tokenizer
from kedge.models.adapters import read_adapter
from kedge.models.loading import Bases
from kedge.models.packing.rows import TokenRows
from kedge.runs.run import open_run
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.roles import Roles, load_roles
from kedge_base.errors import ModelError
from tests.models.test_adapters import adapt, edit
from tests.stages.ppo.test_ppo import copies_at
from tests.stages.test_adapters import LORA, PPO, vowels, weights_of
from tests.tiny import FAMILIES, save_tiny_policy, save_tiny_reward_model

ROWS = [[5, 9, 20, 31], [7, 8]]
PAIRS = [
    {"prompt": "The boat", "chosen": " sails", "rejected": " sinks now"},
    {"prompt": "My rope", "chosen": " holds", "rejected": " broke"},
    {"prompt": "Once", "chosen": " upon a time", "rejected": " twice"},
    {"prompt": "A sailor", "chosen": " sings", "rejected": " sleeps"},
]
REWARD: dict[str, Any] = {
    "comparisons": PAIRS,
    "learning_rate": 1e-2,
    "batch_size": 4,
    "schedule": "constant",
    "num_epochs": 2,
    "eval_fraction": 0.0,
    "precision": "fp32",
    "report": False,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Reward models: an adapter on the base, and one that is whole."""
    folder = tmp_path_factory.mktemp("rewards")
    adapt(base, folder / "adapter", scalar=True)
    save_tiny_reward_model(folder / "whole")
    return folder


def randomize(weights: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_share_their_base_and_nothing_else(tmp_path: Path, family: Any) -> None:
    base = save_tiny_policy(tmp_path / "base", family=family)
    adapt(base, tmp_path / "reward", scalar=True, fan_in_fan_out=family == "gpt2")
    tokenizer, bases, settings = load_tokenizer(base), Bases(), AdapterSettings(rank=4)
    alone = load_scalar_model(tmp_path / "reward", tokenizer=tokenizer)
    reward = load_scalar_model(tmp_path / "reward", tokenizer=tokenizer, bases=bases)
    policy = load_language_model(base, tokenizer=tokenizer, adapter=settings, bases=bases)
    critic = load_scalar_model(base, tokenizer=tokenizer, adapter=settings, bases=bases, init="fresh")
    copied = load_scalar_model(tmp_path / "reward", tokenizer=tokenizer, adapter=settings, bases=bases)
    reference = load_language_model(base, tokenizer=tokenizer, bases=bases)

    roles = [reward, policy, critic, copied, reference]
    holders = Counter(weight.data_ptr() for role in roles for weight in set(role.parameters()))
    whole = load_language_model(base, tokenizer=tokenizer)
    trunk = sum(weight.numel() for weight in set(whole.trunk.model.parameters()))
    shared = {weight.data_ptr(): weight.numel() for weight in reward.parameters() if holders[weight.data_ptr()] == 5}
    assert sum(shared.values()) == trunk, "each weight of the trunk is in memory once"

    rows = TokenRows.of(ROWS, policy.device)
    for seed, role in enumerate((policy, critic)):
        assert role.adapter is not None
        randomize(role.adapter.weights(), seed)
    hidden, values = policy.hidden(rows), critic.read_values(rows).values
    with torch.no_grad():
        torch.testing.assert_close(reward.scores(rows), alone.scores(rows), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(copied.scores(rows), reward.scores(rows))
        assert torch.equal(reference.hidden(rows), whole.hidden(rows))
        assert (hidden - whole.hidden(rows)).abs().max() > 0.01
    (hidden.sum() + values.sum()).backward()  # after other roles have been at work
    for role in (policy, critic):
        assert role.adapter is not None
        trained = role.adapter.weights()
        assert all(weight.grad is not None for weight in trained.values())
        assert {id(each) for each in role.parameters() if each.grad is not None} == set(map(id, trained.values()))
    assert all(weight.grad is None for role in (reward, copied, reference) for weight in role.parameters())


def test_recomputed_activations_are_those_of_the_role(base: Path) -> None:
    """PEFT's own switch of adapters between forward and backward passes gives wrong gradients here, silently."""
    found: list[dict[str, Tensor]] = []
    for again in (False, True):
        tokenizer, bases, settings = load_tokenizer(base), Bases(), AdapterSettings(rank=4)
        torch.manual_seed(0)
        policy = load_language_model(base, tokenizer=tokenizer, adapter=settings, bases=bases)
        critic = load_scalar_model(base, tokenizer=tokenizer, adapter=settings, bases=bases, init="fresh")
        assert policy.adapter is not None
        assert critic.adapter is not None
        assert critic.trunk is not None
        randomize(policy.adapter.weights(), 1)
        randomize(critic.adapter.weights(), 2)
        if again:
            policy.trunk.checkpoint_activations()
            critic.trunk.checkpoint_activations()
        rows = TokenRows.of(ROWS, policy.device)
        hidden, values = policy.hidden(rows), critic.read_values(rows).values
        (hidden.square().sum() + values.square().sum()).backward()
        both = {**policy.adapter.weights(), **{f"critic.{n}": w for n, w in critic.adapter.weights().items()}}
        found.append({name: weight.grad.clone() for name, weight in both.items() if weight.grad is not None})
    plain, recomputed = found
    assert plain.keys() == recomputed.keys() != set()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def reward_by_hand(base: Path, start: Path) -> dict[str, Tensor]:
    """Two full-batch steps on −log σ(better − worse) with PEFT and Adam, one text at a time."""
    tokenizer = load_tokenizer(base)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    plain.config.pad_token_id = tokenizer.pad_token_id
    edit(start, task_type=None)  # it was saved as a language model's
    model = peft.PeftModel.from_pretrained(plain, start, is_trainable=True).eval()
    plain.score.weight.data.copy_(head_numbers(plain.score.weight))
    plain.score.requires_grad_(True)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=REWARD["learning_rate"], eps=1e-5, weight_decay=0.0)

    def score(prompt: str, answer: str) -> Tensor:
        example = encode_example(tokenizer, prompt, answer)
        return model(input_ids=torch.tensor([[*example.prompt, *example.completion]])).logits[0, 0]

    for _ in range(2):
        margins = [score(row["prompt"], row["chosen"]) - score(row["prompt"], row["rejected"]) for row in PAIRS]
        (-torch.nn.functional.logsigmoid(torch.stack(margins)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(start.parent / "by-hand"))
    return {**weights_of(start.parent / "by-hand"), "base_model.model.score.weight": plain.score.weight.detach()}


def head_numbers(weight: Tensor) -> Tensor:
    return 0.3 * torch.arange(1.0, weight.numel() + 1).cos().view(weight.shape)


def test_a_reward_model_that_is_trained_equals_peft_by_hand(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_head(head: Any, init: str) -> Any:
        head.weight.data.copy_(head_numbers(head.weight))
        return head

    monkeypatch.setattr("kedge.models.loading.initialize_head", start_head)
    adapt(base, tmp_path / "start")
    result = kedge.reward(model=tmp_path / "start", out=tmp_path / "run", adapter=LORA, **REWARD)
    found, expected = weights_of(result.model), reward_by_hand(base, tmp_path / "start")
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5, msg=name)

    tokenizer = load_tokenizer(base)
    scores = load_scalar_model(result.model, tokenizer=tokenizer)
    assert scores.trained_here
    assert float(scores.shift) == pytest.approx(result.summary["normalization"]["mean"], rel=1e-5)
    merged = kedge.merge(result.model, tmp_path / "merged")
    again = load_scalar_model(merged, tokenizer=load_tokenizer(merged))
    rows = TokenRows.of(ROWS, again.device)
    with torch.no_grad():
        torch.testing.assert_close(again.scores(rows), scores.scores(rows))
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        plain.config.pad_token_id = tokenizer.pad_token_id
        by_peft = peft.PeftModel.from_pretrained(plain, result.model).eval()
        texts = torch.stack([by_peft(input_ids=torch.tensor([row])).logits[0, 0] for row in ROWS])
        torch.testing.assert_close(scores.scores(rows) + scores.shift, texts, rtol=1e-4, atol=1e-4)


def one_base(roles: Roles) -> int:
    """Bytes of all weights of the roles, each counted once."""
    critic, reward = roles.actor_critic.critic, next(iter(roles.reward.models.values())).model
    models = [each for each in (roles.actor_critic.policy, critic, reward, roles.reference) if each is not None]
    weights = {weight.data_ptr(): weight.nbytes for model in models for weight in model.parameters()}
    return sum(weights.values())


def test_four_roles_are_trained_and_resumed_on_one_base(base: Path, tmp_path: Path) -> None:
    sft = adapt(base, tmp_path / "sft") and tmp_path / "sft"
    adapt(base, tmp_path / "reward", scalar=True)
    settings = {
        "ppo.critic": "separate",
        "ppo.critic_init": "reward",
        "activation_checkpointing": True,
        "value_coef": 1.0,
        "checkpoint.every": 1,
        **PPO,
    }

    def run(name: str, **given: Any) -> Any:
        return kedge.ppo(model=sft, reward=tmp_path / "reward", out=tmp_path / name, adapter=LORA, **settings, **given)

    whole = run("whole", on_update=copies_at(2, tmp_path / "whole", tmp_path / "cut"))
    assert whole.metrics[0]["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    resumed = run("cut", resume=True)
    one, other = weights_of(whole.model), weights_of(resumed.model)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert [row["value/loss"] for row in whole.metrics] == [row["value/loss"] for row in resumed.metrics]


CRITICS: dict[str, dict[str, Any]] = {
    "none": {"ppo.critic": "none", "ppo.advantage": "rloo", "num_responses": 2, "num_prompts": 2},
    "shared": {"ppo.critic": "shared"},
    "policy": {"ppo.critic": "separate", "critic_init": "policy"},
    "reward": {"ppo.critic": "separate", "critic_init": "reward"},
    "saved": {"critic_init": "whole"},
}


MIXES = [mix for mix in product(CRITICS, ("function", "adapter", "whole")) if mix != ("reward", "function")]
"""Each critic and each reward is in one with a reference, and in one without."""


@pytest.mark.parametrize(
    ("critic", "reward", "kl_coef"), [(*mix, (0.0, 0.05)[number % 2]) for number, mix in enumerate(MIXES)]
)
def test_no_mix_of_roles_trains_the_base(
    base: Path, mixed: Path, tmp_path: Path, critic: str, reward: str, kl_coef: float
) -> None:
    settings = {**PPO, **CRITICS[critic], "kl_coef": kl_coef, "adapter": LORA, "out": str(tmp_path / "run")}
    texts = settings.pop("prompts")
    if critic == "saved":
        settings["critic_init"] = str(mixed / "whole")
    scored = vowels if reward == "function" else str(mixed / reward)
    config = with_saved_critic(config_from_settings("ppo", {"model": str(base), **settings}))
    run = open_run(config, "ppo", in_memory={"data.prompts": texts, "reward": scored})
    roles = load_roles(config, run)

    scoring = [each.model for each in roles.reward.models.values()]
    models = [each for each in (roles.actor_critic, roles.reference, *scoring) if each is not None]
    every = {id(weight): (name, weight) for each in models for name, weight in each.named_parameters()}
    before = {number: weight.detach().clone() for number, (_, weight) in every.items()}
    for _, weight in every.values():
        if weight.requires_grad:
            weight.grad = torch.ones_like(weight)
    roles.optimizer.step()
    moved = {name for number, (name, weight) in every.items() if not torch.equal(weight, before[number])}
    own = {name for name, _ in roles.actor_critic.named_parameters() if ".lora_" in name}
    heads = {"shared": {"policy.value_head.weight", "policy.value_head.bias"}, "none": set[str]()}
    assert moved == own | heads.get(critic, {"critic.classifier.score.weight"})


def test_a_whole_chain_stands_on_one_base(base: Path, tmp_path: Path) -> None:
    """sft, reward and PPO give adapters of the same base; policy, reference, reward model and critic share it."""
    texts = [row["prompt"] for row in PAIRS]
    rows = [{"prompt": text, "completion": " sails"} for text in texts]
    result = kedge.rlhf(
        model=base,
        demonstrations=rows,
        comparisons=PAIRS,
        prompts=texts,
        out=tmp_path / "run",
        adapter=LORA,
        eval_fraction=0.0,
        num_updates=2,
        max_new_tokens=6,
        precision="fp32",
        report=False,
        **{"rollout.num_prompts": 4, "rlhf.train_critic": True, "critic.kind": "separate", "missing_eos_score": None},
    )
    folders = [result.sft.model, result.rounds[0].reward.model, result.rounds[0].critic.model, result.model]
    named = {read_adapter(folder).base for folder in folders}
    assert named == {str(base)}
    assert result.rounds[0].ppo.metrics[-1]["objective/kl"] > 0
    merged = kedge.merge(result.model, tmp_path / "merged")
    assert (merged / "config.json").is_file()


def test_whole_modules_are_trained_and_saved(tmp_path: Path) -> None:
    base = save_tiny_policy(tmp_path / "base", family="gpt_neox")
    adapter = {**LORA, "modules_to_save": ["embed_in"]}
    result = kedge.ppo(model=base, reward=vowels, out=tmp_path / "run", adapter=adapter, **PPO)
    name = "base_model.model.gpt_neox.embed_in.weight"
    assert name in weights_of(result.model)
    trained = load_language_model(result.model, tokenizer=load_tokenizer(result.model))
    merged = trained.causal.get_input_embeddings().weight
    torch.testing.assert_close(merged, weights_of(result.model)[name])
    with pytest.raises(ModelError, match="has no module 'nothing'"):
        kedge.ppo(
            model=base, reward=vowels, out=tmp_path / "none", adapter={**LORA, "modules_to_save": ["nothing"]}, **PPO
        )
