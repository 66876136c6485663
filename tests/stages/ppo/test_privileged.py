"""A critic that reads what the policy does not: what it reads, what leaks (nothing), and what cannot be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kedge
from kedge.algorithm.experience import Rollout
from kedge.config import config_from_settings
from kedge.models import ActorCritic, load_language_model, load_scalar_model, load_tokenizer
from kedge.rollout.privileged import PrivilegedText
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.log import Costs, ForwardCost
from kedge_base.errors import ConfigError, DataError, EnvError
from kedge_base.estimators import CRITICS
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import critic_of, privileged_of
from kedge_plan.rows import Rows, lengths_of
from tests.stages.ppo.test_episodes import EPISODES, GAMES, weights
from tests.stages.ppo.test_ppo import configure, metrics_without_times, varied
from tests.tasks.environments import worlds
from tests.tiny import save_tiny_policy

ANSWERS = ["no", "the sea is cold", "7", "of course not", "12", "yes"]
ROWS = [{"prompt": f"Question {number}. ", "answer": answer} for number, answer in enumerate(ANSWERS)]
OTHERS = [{**row, "answer": row["answer"][::-1] + " what"} for row in ROWS]
READS = {"privileged": ["answer"]}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def models(policy: Path) -> ActorCritic:
    tokenizer = load_tokenizer(policy)
    critic = load_scalar_model(policy, tokenizer=tokenizer, init="fresh")
    return ActorCritic(load_language_model(policy, tokenizer=tokenizer), critic)


def sampled(policy: Path, rows: list[dict[str, Any]], template: str = "\nanswer: {answer}\n") -> Rollout:
    """Responses of different lengths, some to one prompt, with the privileged tokens of their rows."""
    tokenizer = load_tokenizer(policy)
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
    width, time = max(map(len, prompts)), 6
    lengths = torch.tensor([1 + number % time for number in range(len(rows))])
    mask = torch.arange(time) < lengths[:, None]
    rollout = Rollout(
        prompt_ids=torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        prompt_mask=torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in prompts]),
        response_ids=torch.where(mask, torch.arange(20, 20 + mask.numel()).view(mask.shape), 0),
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(mask.shape),
        stopped=mask[:, 0],
        group=torch.arange(len(rows)),
        policy_version=torch.zeros(len(rows), dtype=torch.long),
    )
    return PrivilegedText(template).added(rollout, rows, tokenizer)


def test_values_are_those_of_prompt_privileged_text_and_response(policy: Path, models: ActorCritic) -> None:
    tokenizer, critic = load_tokenizer(policy), models.critic
    assert critic is not None
    rollout = sampled(policy, [*ROWS, *ROWS[:2]])
    outputs = models(rollout, temperature=1.0, value_after_last=True)
    for row, entry in enumerate([*ROWS, *ROWS[:2]]):
        before = tokenizer.encode(f"{entry['prompt']}\nanswer: {entry['answer']}\n", add_special_tokens=False)
        response = rollout.response_ids[row][rollout.token_mask[row]].tolist()
        ids = torch.tensor([[*before, *response]])
        hidden = critic.classifier.base_model(ids).last_hidden_state[0, len(before) - 1 :]
        assert critic.head is not None
        expected = critic.head(hidden).squeeze(-1)
        assert torch.allclose(outputs.values[row, : len(response)], expected[:-1], atol=1e-5)
    assert torch.allclose(models.values(rollout), outputs.values * rollout.action_mask, atol=1e-5)


def test_the_policy_reads_none_of_it_to_the_bit(policy: Path, models: ActorCritic) -> None:
    """Its log probabilities, entropies and gradients are those of rows without privileged tokens."""
    found = []
    plain = sampled(policy, ROWS)
    for rollout in (sampled(policy, ROWS), sampled(policy, OTHERS), plain):
        models.zero_grad()
        outputs = models(rollout, temperature=0.7, entropy_gradient=True)
        assert outputs.values is not None
        (outputs.logprobs.sum() + outputs.entropy.sum() + outputs.values.sum()).backward()
        gradients = [each.grad.clone() for each in models.policy.parameters() if each.grad is not None]
        found.append((outputs.logprobs.detach(), outputs.entropy.detach(), gradients, outputs.values.detach()))
    for logprobs, entropy, gradients, _ in found[1:]:
        assert torch.equal(logprobs, found[0][0])
        assert torch.equal(entropy, found[0][1])
        assert all(torch.equal(one, other) for one, other in zip(gradients, found[0][2], strict=True))
    assert not torch.allclose(found[0][3], found[1][3]), "the critic reads it"


def test_a_run_and_a_plan_count_what_only_the_critic_reads(policy: Path, models: ActorCritic, tmp_path: Path) -> None:
    rollout = sampled(policy, [{**row, "answer": "so much more to read " * 4} for row in ROWS])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        models(rollout, temperature=1.0)
    costs = Costs(*(ForwardCost.of(each) for each in (models.policy, models.critic, None)), [])
    metrics = costs.metrics(rollout, models_read="all", num_passes=1, train_policy=True)
    assert metrics["flops/experience"] == pytest.approx(counter.get_total_flops(), rel=0.15)

    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = configure(policy, tmp_path / "run", critic=READS, **{"data.prompts": [str(tmp_path / "prompts.jsonl")]})
    lengths = lengths_of(config, "ppo")
    assert lengths.privileged == int(sampled(policy, ROWS).for_critic.prompt_mask.sum(-1).max()) - lengths.prompts[0]
    rows = Rows(lengths.prompts, (4,) * len(ROWS), None, privileged=lengths.privileged)
    assert rows.rollout(values=False).row_lengths == rows.row_lengths


def test_the_report_says_what_the_critic_reads() -> None:
    for name, kind in CRITICS.items():
        run = RunRecord(
            Path("run"), config={"ppo": {"critic": {name: ["hint", "answer"]} if name == "privileged" else name}}
        )
        assert critic_of(run) == kind
        assert privileged_of(run) == ("hint, answer" if name == "privileged" else "")


def test_a_run_whose_advantages_need_no_values_does_not_depend_on_the_column(policy: Path, tmp_path: Path) -> None:
    settings = {"critic": READS, "advantage": "to_go"}
    for name, digits in (("one", "123456"), ("other", "987654")):  # as many tokens, and so the same passes
        rows = [{**row, "answer": digits[number]} for number, row in enumerate(ROWS)]
        run_ppo(configure(policy, tmp_path / name, **settings), prompts=rows, reward=varied)
    one, other = (weights(tmp_path / name) for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [metrics_without_times(tmp_path / name)[-1]["value/loss"] for name in ("one", "other")]
    assert losses[0] != losses[1], "the critic was trained on it"


def test_passes_of_any_size_give_the_same_run(policy: Path, tmp_path: Path) -> None:
    for name, tokens in (("whole", None), ("parts", 40)):
        config = configure(policy, tmp_path / name, critic=READS, **{"runtime.micro_batch_tokens": tokens})
        run_ppo(config, prompts=ROWS, reward=varied)
    one, other = (weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


def test_an_environment_gives_what_the_critic_reads(policy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The text of an episode has its own secret; one that failed has none."""
    read: list[str] = []
    added = PrivilegedText.added

    def recorded(self: PrivilegedText, rollout: Rollout, rows: list[Any], tokenizer: Any) -> Rollout:
        with_text = added(self, rollout, rows, tokenizer)
        tables = with_text.privileged_ids, with_text.privileged_mask
        read.extend(tokenizer.decode(ids[mask]) for ids, mask in zip(*tables, strict=True))
        return with_text

    monkeypatch.setattr(PrivilegedText, "added", recorded)
    settings = EPISODES | {"critic": {"privileged": "It is {secret}."}, "environment.on_error": "drop"}
    row = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES).metrics[0]
    assert len(read) == 8
    assert {text for text in read if text} <= {f"It is {number}." for number in range(1, 6)}
    assert len(set(read)) > 1
    assert "value/explained_variance" in row


class Silent(worlds.Tuple):
    """Has a secret, and does not tell it."""

    def privileged(self) -> Any:
        return 7


def test_what_cannot_be_read_is_said_in_one_line(policy: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], words: str, rows: Any = ROWS, **settings: Any) -> None:
        environment = settings.pop("environment", None)
        source = {"reward": varied} if environment is None else {"environment": environment}
        with pytest.raises(kind, match=words) as error:
            run_ppo(configure(policy, tmp_path / "run", **settings), prompts=rows, **source)
        assert "\n" not in str(error.value).rstrip("\n")
        assert not (tmp_path / "run").exists()

    for template in ("The answer.", "{", "{}", "{answer.x}", "{answer!r}", "{answer:>9}", []):
        with pytest.raises(ConfigError, match="privileged"):
            config_from_settings("ppo", {"critic": {"privileged": template}})
    rows = [*ROWS[:3], {"prompt": "Why?", "solution": "x"}, {"prompt": "And?", "answer": None}]
    refused(DataError, "list:4 has no 'answer', which the critic .* there are: prompt, solution", rows, critic=READS)
    refused(DataError, "no 'proof'", critic={"privileged": ["answer", "proof"]})
    long = [{**row, "answer": "word " * 300} for row in ROWS]
    refused(
        DataError,
        "list:1: the critic reads at most 256 tokens, and the prompt has 11, what ppo.critic=privileged adds 1210",
        long,
        critic=READS,
    )
    games = [{"prompt": game} for game in GAMES]
    refused(DataError, "an episode of Guess has no 'hint'", games, critic={"privileged": ["hint"]}, **EPISODES)
    missing = EPISODES | {"environment.source": None, "environment": Silent}
    refused(EnvError, "Silent.privileged gave 7; expected a mapping", games, critic=READS, **missing)


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_trained_critic_reads_in_ppo_what_it_was_trained_on(policy: Path, tmp_path: Path, adapter: Any) -> None:
    more = {} if adapter is None else {"adapter.kind": adapter}
    common = {"model": policy, "prompts": ROWS, "reward": varied, "max_new_tokens": 6, "runtime.report": False, **more}
    trained = kedge.critic(
        **common, critic={"privileged": ["answer"]}, out=tmp_path / "critic", **{"critic.num_responses": 2}
    )
    config = config_from_settings("ppo", {"model": str(policy), "critic_init": str(trained.model)})
    assert with_saved_critic(config).ppo.privileged == "\nanswer: {answer}\n"
    result = kedge.ppo(**common, critic=trained.model, out=tmp_path / "run", num_updates=1, num_prompts=4)
    assert "privileged: '" in (result.folder / "config.yaml").read_text()
    with pytest.raises(DataError, match="no 'answer'"):
        kedge.ppo(**{**common, "prompts": GAMES}, critic=trained.model, out=tmp_path / "other", num_updates=1)


def test_a_smaller_language_model_can_be_the_critics_start(policy: Path, tmp_path: Path, capsys: Any) -> None:
    small = save_tiny_policy(tmp_path / "small", "gpt2")
    config = configure(policy, tmp_path / "run", critic=READS, critic_init=str(small))
    rows = run_ppo(config, prompts=ROWS, reward=varied).metrics
    assert "has no trained head" in capsys.readouterr().err
    assert rows[0]["value/mean"] == pytest.approx(rows[0]["value/returns_mean"], abs=1e-4), "starts at the mean"
