"""vLLM as rollout engine of PPO runs, against a stand-in that samples with transformers from the weights it gets."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.settings import PpoSettings
from kedge_base.errors import ConfigError, EngineError, NumericsError
from tests.rollout.vllm.stand_in import StandIn
from tests.stages.ppo.test_ppo import PROMPTS, configure, varied, vowels
from tests.tasks.environments import worlds
from tests.tiny import save_tiny_policy, tiny_causal_lm, tiny_tokenizer


class Sampling:
    """Samples with transformers' own forward pass, one row at a time, from the weights of the newest update."""

    def __init__(self, policy: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(policy).eval()
        self.updates: list[dict[str, torch.Tensor]] = []
        self.folders: list[str] = []
        self.is_stale = False

    def load(self, info: dict[str, Any]) -> None:
        [path] = Path(info["path"]).glob("*.safetensors")
        self.folders.append(info["path"])
        self.updates.append(load_file(path))
        if not self.is_stale or len(self.updates) == 1:
            self.model.load_state_dict(self.updates[-1])

    @torch.no_grad()
    def __call__(self, prompt: list[int], asked: dict[str, Any]) -> tuple[list[int], list[float]]:
        generator, tokens, logprobs = torch.Generator().manual_seed(asked["seed"]), [], []
        bias = torch.zeros(self.model.config.vocab_size)
        for token, value in asked.get("logit_bias", {}).items():
            bias[int(token)] = value
        while len(tokens) < asked["max_tokens"] and not set(tokens) & set(asked["stop_token_ids"]):
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float() + bias
            logprob = (logits / (asked["temperature"] or 1.0)).log_softmax(-1)
            draw = torch.multinomial(logprob.exp(), 1, generator=generator)
            tokens.append(int(logits.argmax() if asked["temperature"] == 0 else draw))
            logprobs.append(float(logprob[tokens[-1]]))
        return tokens, logprobs


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    model, tokenizer = tiny_causal_lm(vocab_size=303), tiny_tokenizer()  # three ids without a token
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def server(policy: Path) -> Iterator[SimpleNamespace]:
    sampling = Sampling(policy)
    with StandIn(sample=sampling, on_update=sampling.load) as stand_in:
        yield SimpleNamespace(http=stand_in, sampling=sampling, url=stand_in.url)


def settings(server: SimpleNamespace, **more: Any) -> dict[str, Any]:
    return {"rollout.engine": "vllm", "rollout.engine.servers": server.url, "temperature": 0.7, **more}


def test_a_run_samples_on_the_server_and_sends_it_every_version_of_the_weights(tmp_path, policy, server):
    made = configure(policy, tmp_path / "run", num_updates=3, num_responses=2, critic="shared", **settings(server))
    rows = run_ppo(made, prompts=PROMPTS, reward=vowels).metrics
    assert len(rows) == 3
    for row in rows:
        # transformers computes row by row, kedge in batches: they differ by rounding
        assert 1 <= row["policy/sampler_ratio_max"] < 1 + 1e-4
        assert 0 <= row["policy/sampler_k3"] < 1e-8
        assert row["policy/sampler_share"] == pytest.approx(1, abs=1e-6)
        assert row["time/publish"] > 0
    sent = server.sampling.updates
    assert len(sent) == 4, "at the start and after every update"
    for weights in sent:
        assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]), "tied, under both names"
    assert not torch.equal(sent[0]["lm_head.weight"], sent[1]["lm_head.weight"])
    requests = server.http.requests
    assert len({request["cache_salt"] for request in requests}) == 3, "a cached prefix belongs to one version"
    for request in requests:
        asked = request["sampling_params"]
        assert {asked["top_p"], asked["top_k"], asked["n"], asked["temperature"]} == {1.0, 0, 0.7}
        assert asked["logit_bias"] == {str(token): -100.0 for token in (0, 300, 301, 302)}
        assert 0 <= asked["seed"] < 2**32
    prompts = [tuple(request["token_ids"]) for request in requests[:8]]
    assert len(set(prompts)) == 4, "two responses for each of four prompts"
    assert len({request["sampling_params"]["seed"] for request in requests}) == len(requests)
    assert not any(Path(folder).exists() for folder in server.sampling.folders), "nothing is left behind"
    assert not server.http.paused
    assert not server.http.active


def test_greedy_responses_are_asked_for_at_temperature_0(tmp_path, policy, server):
    remax = {"advantage": "remax", "critic": "none", "num_updates": 1, "num_responses": 2}
    run_ppo(configure(policy, tmp_path / "run", **settings(server), **remax), prompts=PROMPTS, reward=vowels)
    asked = [request["sampling_params"]["temperature"] for request in server.http.requests]
    assert asked.count(0.0) * 2 == asked.count(0.7) > 0


def test_weights_that_the_server_does_not_load_are_an_incident_and_stop_a_strict_run(tmp_path, policy, server):
    server.sampling.is_stale = True
    lost = configure(policy, tmp_path / "run", num_updates=3, strict=True, **settings(server, learning_rate=1e-2))
    with pytest.raises(NumericsError, match=r"update 2: sampler and trainer disagree.*k3 is .* same weights"):
        run_ppo(lost, prompts=PROMPTS, reward=vowels)


def test_an_answer_of_other_weights_ends_the_run_in_one_line(tmp_path, policy, server, monkeypatch):
    monkeypatch.setattr(StandIn, "version", property(lambda self: "other", lambda self, version: None), raising=False)
    with pytest.raises(EngineError, match=r"sampled with weights other instead of .*-v0: a weight update was lost"):
        run_ppo(configure(policy, tmp_path / "run", **settings(server)), prompts=PROMPTS, reward=vowels)


def test_a_run_that_is_resumed_begins_with_the_weights_of_its_checkpoint(tmp_path, policy, server):
    from kedge.runs.run import Resume

    whole = configure(policy, tmp_path / "whole", num_updates=2, **settings(server, **{"checkpoint.every": 1}))
    run_ppo(whole, prompts=PROMPTS, reward=vowels)
    first = [dict(weights) for weights in server.sampling.updates]
    server.sampling.updates.clear()
    longer = configure(policy, tmp_path / "whole", num_updates=3, **settings(server, **{"checkpoint.every": 1}))
    run_ppo(longer, prompts=PROMPTS, reward=vowels, resume=Resume(("ppo.num_updates",)))
    assert torch.equal(server.sampling.updates[0]["lm_head.weight"], first[-1]["lm_head.weight"])
    assert len(server.sampling.updates) == 2


def test_weights_that_were_rolled_back_are_sent_before_the_next_rollout(tmp_path, policy, server):
    calls = []

    def sometimes(completions, **_):
        calls.append(len(completions))
        return [math.nan if len(calls) == 3 else float(len(text)) for text in completions]

    often = {"checkpoint.every": 1, "reward_functions.retries": 0, "on_nonfinite": "rollback"}
    made = configure(policy, tmp_path / "run", num_updates=4, **settings(server, **often))
    rows = run_ppo(made, prompts=PROMPTS, reward=sometimes).metrics
    assert [row["guard/rolled_back"] for row in rows] == [0, 0, 1, 0]
    sent = [weights["lm_head.weight"] for weights in server.sampling.updates]
    assert len(sent) == 5, "at the start, after updates 1, 2 and 4, and before update 4"
    assert torch.equal(sent[3], sent[2])
    assert max(row.get("policy/sampler_k3", 0.0) for row in rows) < 1e-8


def test_weights_that_a_callback_changes_are_sent_before_the_next_rollout(tmp_path, policy, server):
    """Under another name: the server keeps what the weights of the evaluation have read of a prompt."""

    def change(update):
        with torch.no_grad():
            for weight in update.model.parameters() if update.number == 1 else ():
                weight.mul_(1.3)

    more = {"num_updates": 3, "eval_every": 1, "num_fixed_prompts": 0}
    made = configure(policy, tmp_path / "run", **settings(server, **more))
    rows = run_ppo(made, prompts=PROMPTS, eval_prompts=PROMPTS[:1], reward=vowels, callback=change).metrics
    sent = [weights["lm_head.weight"] for weights in server.sampling.updates]
    assert len(sent) == 5, "at the start, after every update, and after the callback"
    assert torch.equal(sent[2], sent[1] * 1.3)
    assert max(row["policy/sampler_k3"] for row in rows) < 1e-8
    versions = [request["cache_salt"].rpartition("-")[2] for request in server.http.requests]
    names = {request["cache_salt"] for request in server.http.requests}
    assert (len(names), set(versions)) == (5, {"v0", "v1", "v2", "v3"})


def test_everything_that_a_run_measures_is_sampled_on_the_server(tmp_path, policy, server):
    measured = {"eval_every": 1, "critic_check": 1, "ppo.critic_check.size": [32, 4, 2], "num_fixed_prompts": 2}
    made = configure(policy, tmp_path / "run", num_updates=1, critic="shared", **settings(server, **measured))
    [row] = run_ppo(made, prompts=PROMPTS[:4], eval_prompts=PROMPTS[4:], reward=vowels).metrics
    assert {"eval/score", "time/evaluation", "time/critic_check"} <= row.keys()
    asked = [request["sampling_params"] for request in server.http.requests]
    assert len({each["max_tokens"] for each in asked}) > 1, "continuations of prefixes are shorter"


@pytest.mark.parametrize(
    ("cap", "is_exact", "resolved"),
    [("auto", True, None), ("auto", False, 2.0), (3.0, True, 3.0), (None, False, None)],
)
def test_importance_weights_are_the_default_where_the_engine_is_not_exact(policy, tmp_path, cap, is_exact, resolved):
    made = configure(policy, tmp_path / "run", **{"ppo.old_logprobs.cap": cap})
    assert PpoSettings.of(made, exact=is_exact).estimation.importance_cap == resolved


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({}, "needs rollout.engine.servers"),
        ({"rollout.engine.servers": ["http://b", "a"]}, "a is not an address"),
        ({"rollout.engine.servers": "localhost:8000"}, "localhost:8000 cannot be run"),
        ({"rollout.engine.servers": "http://127.0.0.1:9"}, "http://127.0.0.1:9 does not answer"),
        ({"rollout.engine.servers": "/nowhere/python"}, "/nowhere/python cannot be run"),
        ({"rollout.engine.servers": "/bin/false"}, "/bin/false has no vLLM"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(tmp_path, wrong, line):
    nothing = save_tiny_policy(tmp_path / "policy")
    (nothing / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ConfigError, match=line):
        run_ppo(
            configure(nothing, tmp_path / "run", **{"rollout.engine": "vllm"}, **wrong), prompts=PROMPTS, reward=vowels
        )
    assert not (tmp_path / "run").exists()


def test_one_step_off_the_server_samples_with_the_weights_of_one_update_before(tmp_path, policy, server):
    more = {"num_updates": 4, "max_staleness": 1, "eval_every": 2, "num_fixed_prompts": 1}
    made = configure(policy, tmp_path / "run", **settings(server, **more))
    rows = run_ppo(made, prompts=PROMPTS, eval_prompts=PROMPTS[:1], reward=varied).metrics
    assert [row["policy/staleness"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["policy/sampler_k3"] < 1e-8 < rows[1]["policy/sampler_k3"]
    assert not (tmp_path / "run" / "incidents.jsonl").exists(), "weights of another version are not a mismatch"
    versions = Counter(request["cache_salt"].rpartition("-")[2] for request in server.http.requests)
    # Four responses per update: of 1 and 2, of 3, of 4. One fixed prompt at the start and the end; an evaluation at the
    # start, after update 2 and at the end, by the weights of then.
    assert versions == {"v0": 4 + 4 + 2, "v1": 4, "v2": 4 + 1, "v4": 2}


def test_episodes_are_sampled_turn_by_turn_after_everything_that_was_said(tmp_path, policy, server):
    """Each turn is asked for with the whole conversation in the tokens that were sampled, and another seed."""
    more = {
        "num_updates": 1,
        "learning_rate": 0.0,
        "max_new_tokens": 40,
        "environment.source": f"{worlds.__file__}:Guess",
        "environment.max_turns": 3,
        "environment.max_turn_tokens": 5,
    }
    [row] = run_ppo(configure(policy, tmp_path / "run", **settings(server, **more)), prompts=PROMPTS).metrics
    assert row["policy/sampler_ratio_max"] < 1.001
    assert row["episode/turns"] > 1
    requests = server.http.requests
    opened = [asked for asked in requests if not any(is_before(other, asked) for other in requests)]
    later = [asked for asked in requests if asked not in opened]
    assert len(opened) == 4
    assert later
    reply = tiny_tokenizer().encode("no.\n")
    for asked in requests:
        assert asked["sampling_params"]["max_tokens"] <= 5
    for asked in later:
        assert asked["token_ids"][-len(reply) :] == reply
        [before] = [other for other in requests if is_before(other, asked, by=1)]
        assert asked["sampling_params"]["seed"] == before["sampling_params"]["seed"] + 1
        said = asked["token_ids"][len(before["token_ids"]) : -len(reply)]
        assert server.sampling(before["token_ids"], before["sampling_params"])[0] == said


def is_before(asked: dict[str, Any], later: dict[str, Any], *, by: int | None = None) -> bool:
    """True if a request is of the same conversation, some turns before another; seeds count the turns."""
    one, other = asked["token_ids"], later["token_ids"]
    turns = later["sampling_params"]["seed"] - asked["sampling_params"]["seed"]
    return len(one) < len(other) and other[: len(one)] == one and (0 < turns < 4 if by is None else turns == by)


def test_turns_with_contexts_of_their_own_are_asked_for_with_them(tmp_path, policy, server):
    """The server is sent what the policy reads: its log probabilities are those of the trainer."""
    more = {"environment.source": f"{worlds.__file__}:Rooms", "environment.max_turns": 5}
    more |= {"environment.max_turn_tokens": 5, "max_new_tokens": 120, "num_updates": 2, "missing_eos_score": None}
    rows = run_ppo(configure(policy, tmp_path / "run", **settings(server, **more)), prompts=PROMPTS).metrics
    for row in rows:
        assert row["episode/contexts"] > 1
        assert 1 <= row["policy/sampler_ratio_max"] < 1 + 1e-4
    lengths = [len(request["token_ids"]) for request in server.http.requests]
    assert any(after < before for before, after in itertools.pairwise(lengths))
