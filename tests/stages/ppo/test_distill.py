"""On-policy distillation: `--preset distill --teacher MODEL`, without a reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kedge
from kedge.config import Config, check_stage, config_from_settings
from kedge.runs.run import Resume, open_run
from kedge.stages.ppo import roles, run_ppo
from kedge.stages.ppo.roles import load_roles
from kedge.stages.ppo.trainer import Trainer
from kedge_base.errors import ConfigError, DataError, ModelError
from kedge_base.run_folder.record_format import EVALUATIONS_FILE, read_json_lines, read_samples
from kedge_inspect.diagnosis import diagnose_run
from kedge_inspect.page.sentences import of_ppo
from kedge_inspect.record import read_run
from kedge_plan.plan import count_stage
from tests.forking import forked_kedge
from tests.stages.ppo.test_ppo import PROMPTS, copies_at, metrics_without_times
from tests.tiny import save_tiny_policy, tiny_tokenizer

RUN: dict[str, Any] = {
    "preset": "distill",
    "num_prompts": 96,
    "num_updates": 24,
    "max_new_tokens": 10,
    "learning_rate": 4e-3,
    "schedule": "constant",
    "max_grad_norm": 1.0,
    "num_fixed_prompts": 0,
    "report": False,
    "device": "cpu",
    "precision": "fp32",
}


SAILS = [f"{prompt} sails far." for prompt in PROMPTS]
SINKS = [f"{prompt} sinks fast." for prompt in PROMPTS]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says either with the same probability."""
    return save_model(tmp_path_factory.mktemp("models") / "student", texts=[*SAILS, *SINKS])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Larger, with an output matrix wider than the tokenizer; says one of the two nearly always."""
    return save_model(tmp_path_factory.mktemp("models") / "teacher", texts=[*SAILS * 9, *SINKS], size=24, extra_rows=12)


def save_model(
    folder: Path,
    *,
    texts: Sequence[str] = (),
    size: int = 16,
    vocab_size: int = 300,
    extra_rows: int = 0,
    context: int = 256,
) -> Path:
    """A small Llama that has read some texts sixty times."""
    tokenizer = tiny_tokenizer(vocab_size=vocab_size)
    config = LlamaConfig(
        vocab_size=vocab_size + extra_rows,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(size)
        model = LlamaForCausalLM(config)
    rows = [[*tokenizer.encode(text), 2] for text in texts]
    ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60 if texts else 0):
        loss: Any = model(ids, labels=ids.masked_fill(ids == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def configure(student: Path, out: Path, **settings: Any) -> Config:
    return config_from_settings("ppo", {"model": str(student), "out": str(out), **RUN, **settings})


def distances(rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """KL to the teacher, nats per token, in the first and in the last six updates."""
    each = [row["objective/kl"] / row["response/length"] for row in rows]
    return mean(each[:6]), mean(each[-6:])


def sails(run: Path) -> tuple[float, float]:
    """The share of the teacher's usual response among those of the first and of the last update."""
    rows = read_samples(run)
    parts = ([row["response"] for row in rows if row["update"] == update] for update in (1, rows[-1]["update"]))
    first, last = (mean(each.startswith(" sails") for each in part) for part in parts)
    return first, last


def slow_logprobs(source: Path, prompt: list[int], response: list[int]) -> list[float]:
    """Log probabilities of a response by plain transformers; padding and rows without a token are never sampled."""
    model: Any = AutoModelForCausalLM.from_pretrained(source).eval()
    logits: Tensor = model(torch.tensor([prompt + response])).logits[0].double()
    logits[:, [0, *range(300, logits.shape[1])]] = -torch.inf
    found = logits.log_softmax(-1)
    return [float(found[len(prompt) + place - 1, token]) for place, token in enumerate(response)]


@torch.no_grad()
def test_a_tokens_advantage_is_minus_its_log_ratio_to_the_teacher(student: Path, teacher: Path, tmp_path: Path) -> None:
    config = configure(student, tmp_path / "run", reference=str(teacher), num_prompts=4)
    run = open_run(config, "ppo", in_memory={"data.prompts": PROMPTS})
    trainer = Trainer.of(config, run, load_roles(config, run))
    trainer.begin(1)
    prompts = trainer.roles.prompts.train[:4]
    experience = trainer.estimate(trainer.score(trainer.sample(prompts), prompts), takes_steps=False)
    assert experience.scores.tolist() == [0.0] * 4
    rollout = experience.rollout
    for row in range(4):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
        response = rollout.response_ids[row][rollout.action_mask[row]].tolist()
        ours, theirs = (slow_logprobs(source, prompt, response) for source in (student, teacher))
        expected = torch.tensor([-(one - other) for one, other in zip(ours, theirs, strict=True)])
        torch.testing.assert_close(experience.advantages[row][rollout.action_mask[row]], expected, atol=1e-4, rtol=1e-4)
        assert expected.abs().max() > 0.1


def test_the_reverse_kl_to_the_teacher_falls(student: Path, teacher: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    out = tmp_path / "run"
    settings = {name: value for name, value in RUN.items() if name not in ("preset", "report")}
    done = forked_kedge(
        *("ppo", "--preset", "distill", "--model", student, "--teacher", teacher, "--prompts", prompts, "--out", out),
        *(f"{name}={value}" for name, value in settings.items()),
        *("ppo.eval_every=12", "data.eval_fraction=0.34", "rollout.num_responses=2", "rollout.num_prompts=48"),
        "runtime.num_samples=96",
    )
    assert done.returncode == 0, done.stderr
    rows = read_json_lines(out / "metrics.jsonl")
    start, end = distances(rows)
    assert end < start / 2
    first, last = sails(out)
    assert first < 0.7 < 0.8 < last, "of 96 samples each, with a standard error of 0.04"
    assert not [name for name in rows[0] if name.startswith(("reward/score", "score/", "group/", "value/"))]
    assert "objective/reference_error" not in rows[0]
    for row in rows:
        assert row["reward/total"] == pytest.approx(-row["objective/kl"], abs=1e-4)
    first, *_, last = read_json_lines(out / EVALUATIONS_FILE)
    assert last["eval/kl"] < first["eval/kl"]
    assert (first["eval/total"], "eval/score" in first) == (pytest.approx(-first["eval/kl"], abs=1e-4), False)
    record = read_run(out)
    assert record.best["metric"] == "eval/total"
    # Six prompts are few; and a token that the teacher hardly knows has a log ratio, and a gradient, of any size.
    assert {each.rule for each in diagnose_run(out)} <= {"duplicated_prompts", "gradient_spikes"}
    [sentence, *_] = of_ppo(record, "24 updates")
    assert sentence.startswith("24 updates: the KL to the teacher ")
    assert "held-out prompts: KL to the teacher " in done.stderr
    assert " score " not in done.stderr
    assert {row["score"] for row in read_samples(out)} == {None}
    card = (out / "model" / "README.md").read_text()
    assert "| KL to teacher, last update |" in card
    assert "mean score" not in card
    assert "the KL to the teacher" in (out / "report.html").read_text()


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_best_student_has_the_lowest_kl(student: Path, teacher: Path, tmp_path: Path, kl_in: str) -> None:
    settings = {"num_prompts": 48, "num_updates": 6, "kl_in": kl_in, "eval_every": 2, "reference": str(teacher)}
    run_ppo(configure(student, tmp_path / "run", **settings), prompts=PROMPTS, eval_prompts=PROMPTS)
    rows = read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    assert [row["eval/total"] for row in rows] == pytest.approx([-row["eval/kl"] for row in rows], abs=1e-4)
    best = min(rows, key=lambda row: row["eval/kl"])
    assert best["update"] > 0
    assert read_run(tmp_path / "run").best["update"] == best["update"]


def test_a_run_of_distillation_resumes_to_the_bit_and_not_with_another_teacher(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    settings = {"num_updates": 4, "num_prompts": 4, "checkpoint.every": 1}
    mine = save_model(tmp_path / "mine")
    whole, part = (configure(student, tmp_path / name, reference=str(mine), **settings) for name in ("whole", "part"))
    run_ppo(whole, prompts=PROMPTS, on_update=copies_at(3, tmp_path / "whole", tmp_path / "part"))
    other = configure(student, tmp_path / "part", reference=str(teacher), **settings)
    with pytest.raises(ConfigError, match=r"ppo\.reference: .* in the run, .* now"):
        run_ppo(other, prompts=PROMPTS, resume=Resume())
    kept = (mine / "model.safetensors").read_bytes()
    (mine / "model.safetensors").write_bytes((save_tiny_policy(tmp_path / "x") / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"ppo\.reference: the files have changed"):
        run_ppo(part, prompts=PROMPTS, resume=Resume())
    (mine / "model.safetensors").write_bytes(kept)
    run_ppo(part, prompts=PROMPTS, resume=Resume())
    assert metrics_without_times(tmp_path / "part") == metrics_without_times(tmp_path / "whole")


def test_an_adapter_learns_from_a_teacher_on_another_base(student: Path, teacher: Path, tmp_path: Path) -> None:
    result = kedge.ppo(
        model=student,
        teacher=teacher,
        prompts=PROMPTS,
        out=tmp_path / "run",
        adapter={"kind": "lora", "rank": 8},
        **{**RUN, "num_updates": 32, "learning_rate": 8e-3},
    )
    start, end = distances(result.metrics)
    assert end < 0.85 * start
    sizes = json.loads((result.folder / "roles.json").read_text())
    weights = load_file(teacher / "model.safetensors")
    assert sizes["reference"]["parameters"] == sum(each.numel() for each in weights.values())
    assert not sizes["reference"]["trained"]
    # And the teacher is an adapter on the student's own base, whose weights they share.
    again = kedge.ppo(
        model=student,
        teacher=result.model,
        prompts=PROMPTS,
        out=tmp_path / "again",
        adapter={"kind": "lora", "rank": 4},
        **{**RUN, "num_updates": 1},
    )
    assert again.metrics[0]["objective/kl"] > 0.1
    shared = json.loads((again.folder / "roles.json").read_text())
    assert shared["reference"]["parameters"] < shared["base"]["parameters"] / 2


def test_a_teacher_may_accompany_a_reward(student: Path, teacher: Path, tmp_path: Path) -> None:
    config = configure(student, tmp_path / "run", reference=str(teacher), num_updates=1, num_prompts=4)
    result = run_ppo(config, prompts=PROMPTS, reward=lambda completions, **_: [2.0] * len(completions))
    row = result.metrics[0]
    assert row["reward/score_mean"] == 2.0
    assert row["reward/total"] == pytest.approx(2.0 - row["objective/kl"], abs=1e-4)


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_is_loaded(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_model(tmp_path / "other", vocab_size=290)
    monkeypatch.setattr(roles, "load_actor_critic", lambda *_: pytest.fail("the policy was loaded"))
    with pytest.raises(
        ModelError, match=r"another vocabulary than the policy: its 290 tokens lack \d+ of 300, such as '.*', or"
    ) as e:
        run_ppo(configure(student, tmp_path / "run", reference=str(other)), prompts=PROMPTS)
    assert "\n" not in str(e.value)
    with pytest.raises(ModelError, match="gone"):
        run_ppo(configure(student, tmp_path / "run", reference=str(tmp_path / "gone")), prompts=PROMPTS)
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_more_tokens_rates_those_of_the_student(student: Path, tmp_path: Path) -> None:
    """The student's own weights with two more tokens: without these, the distributions are the same."""
    tokenizer = AutoTokenizer.from_pretrained(student)
    model = AutoModelForCausalLM.from_pretrained(student)
    tokenizer.add_tokens(["<call>", "</call>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():  # so likely that they would take most of the probability
        model.get_output_embeddings().weight[-2:] = 40 * model.get_output_embeddings().weight[5]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "sibling")
    config = configure(student, tmp_path / "run", reference=str(tmp_path / "sibling"), num_updates=1, num_prompts=2)
    assert run_ppo(config, prompts=PROMPTS).metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    config = configure(tmp_path / "sibling", tmp_path / "other", reference=str(student), num_updates=1, num_prompts=2)
    with pytest.raises(ModelError, match=r"its 300 tokens lack 2 of 302, such as '</call>', or have them"):
        run_ppo(config, prompts=PROMPTS)


def test_a_teacher_may_end_its_texts_with_another_token(student: Path, tmp_path: Path) -> None:
    """A base model and its instruction-tuned sibling."""
    sibling = save_model(tmp_path / "sibling")
    path = sibling / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<bos>"}))
    config = configure(student, tmp_path / "run", reference=str(sibling), num_updates=1, num_prompts=2)
    assert len(run_ppo(config, prompts=PROMPTS).metrics) == 1


def test_prompts_leave_room_for_the_teachers_context(student: Path, tmp_path: Path) -> None:
    short = save_model(tmp_path / "short", context=32)
    config = configure(student, tmp_path / "run", reference=str(short), max_rejected_fraction=0.0)
    with pytest.raises(DataError, match="1 of 7 rows"):
        run_ppo(config, prompts=[*PROMPTS, "The boat " * 12])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": []}, "needs reward: pass reward=, or teacher= to distill"),
        ({"reward": "f.py:f"}, "preset distill learns from a teacher: pass teacher="),
        ({"reference": "t", "constant_groups": "drop", "num_responses": 2}, "without .* use ppo.constant_groups=keep"),
        ({"reference": "t", "data.rest": 1, "num_responses": 2}, r"data\.draw compares .* use data\.draw=evenly"),
    ],
)
def test_what_is_missing_is_named(settings: dict[str, Any], said: str) -> None:
    given = {"model": "m", "data.prompts": "p", **RUN, **settings}
    with pytest.raises(ConfigError, match=said):
        check_stage(config_from_settings("ppo", given), "ppo")


def test_a_teacher_that_would_have_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ppo\.reference=t has no effect with ppo\.kl_coef=0"):
        config_from_settings("ppo", {"reference": "t", "kl_coef": 0})
    assert config_from_settings("ppo", {"reference": "t", "kl_coef": 0, "measure_kl": True}).ppo.needs_reference


def test_the_plan_counts_the_teachers_own_weights(student: Path, teacher: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "The boat"}) + "\n")
    settings = {"data.prompts": str(prompts), "reference": str(teacher)}
    figures = count_stage(configure(student, tmp_path / "run", **settings), "ppo").figures
    weights = load_file(teacher / "model.safetensors")
    assert figures["parameters", "reference"] == sum(each.numel() for each in weights.values())
