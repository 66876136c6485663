"""The reference trainer: its model against finite differences and transformers, its updates against committed ones."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from ppo_conformance.adapters.reference import Adapter
from ppo_conformance.checks import metamorphic, update, vectors
from ppo_conformance.oracle.__main__ import rewrite
from ppo_conformance.protocol import Deviation, NotOffered
from ppo_conformance.reference.model import Llama, Weights, initial_weights
from tests.float64 import in_float64

MODEL = {"vocabulary": 24, "width": 16, "layers": 2, "heads": 2, "hidden": 24, "tied": False, "head": "value_head"}
IDS = np.arange(14).reshape(2, 7) * 5 % 24


def loss_of(weights: Weights, slopes: tuple[np.ndarray, np.ndarray]) -> tuple[float, Weights]:
    """A weighted sum of logits and values, and its gradient."""
    model = Llama(weights, MODEL["heads"])
    hidden, backward = model.hidden(IDS)
    outputs = [model.output(hidden, layer) for layer in ("lm_head", "value_head")]
    backward(sum(undo(slope) for (_, undo), slope in zip(outputs, slopes, strict=True)))
    return float(sum((out * slope).sum() for (out, _), slope in zip(outputs, slopes, strict=True))), model.gradients


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_every_weight_is_that_of_central_differences(tied):
    draw = np.random.default_rng(0)
    weights, slopes = (
        initial_weights({**MODEL, "tied": tied}),
        (draw.normal(size=(2, 7, 24)), draw.normal(size=(2, 7, 1))),
    )
    _, gradients = loss_of(weights, slopes)
    for name, weight in weights.items():
        step = 1e-6 * draw.normal(size=weight.shape)
        above, below = (loss_of({**weights, name: weight + sign * step}, slopes)[0] for sign in (1, -1))
        assert (above - below) / 2 == pytest.approx((gradients[name] * step).sum(), rel=1e-6), name


@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_are_those_of_transformers(tied, monkeypatch):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    weights = initial_weights({**MODEL, "tied": tied, "head": None})
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "rms_norm_eps": 1e-6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, attn_implementation="eager"))
    in_float64(model, monkeypatch)
    found = model.load_state_dict({name: torch.from_numpy(each) for name, each in weights.items()}, strict=not tied)
    assert found.missing_keys == (["lm_head.weight"] if tied else [])
    ours = Llama(weights, MODEL["heads"])
    logits, _ = ours.output(ours.hidden(IDS)[0])
    # transformers computes the frequencies of the rotation in float32.
    np.testing.assert_allclose(model(torch.from_numpy(IDS)).logits.detach().numpy(), logits, atol=2e-6)


def test_the_committed_weights_are_those_of_the_reference_trainer(capsys):
    made = {update.FOLDER / f"{name}.json": update.filled(name) for name in update.CASES}
    assert rewrite(made, check=True) == 0
    assert capsys.readouterr().out == "differ: none\n"


def test_a_file_that_differs_is_named_or_written(tmp_path, capsys):
    path = tmp_path / "case.json"
    path.write_text('{"expected": 1.0}')
    assert rewrite({path: {"expected": 2.0}}, check=True) == 1
    assert json.loads(path.read_text()) == {"expected": 1.0}
    assert rewrite({path: {"expected": 2.0}}, check=False) == 0
    assert json.loads(path.read_text()) == {"expected": 2.0}
    assert capsys.readouterr().out == "differ: case\nwritten: case\n"


def test_whole_updates_move_every_tensor():
    """A tensor without a gradient would be compared with itself."""
    for name in update.CASES:
        case = update.chosen(update.load(name), update.REFERENCE)
        after, before = update.updated(update.REFERENCE, case), initial_weights(case["model"])
        trained = [each for each in before if not case["model"].get("lora") or "lora" in each or "value_head" in each]
        assert [each for each in before if np.abs(after[each] - before[each]).max() > 1e-4] == trained, name


def test_an_adapter_may_be_a_dataclass():
    """It is not hashable. Equal ones may make other updates."""

    @dataclass
    class Counting(Adapter):
        def __post_init__(self):
            self.count = 0

        def update(self, case):
            self.count += 1
            return super().update(case)

    one, other = Counting(), Counting()
    case = update.chosen(update.load("sft"), one)
    for adapter in (one, one, other):
        assert update.check_whole("sft", adapter) == 0
        update.updated(adapter, case)
    assert (one.count, other.count) == (1, 1)


ARRANGEMENTS = [check for check in update.checks() if check.case != "whole"]


@pytest.mark.parametrize("check", ARRANGEMENTS, ids=lambda check: check.name)
def test_the_reference_makes_the_same_update_in_every_arrangement(check):
    assert check.run(update.REFERENCE) < 1e-10


@pytest.mark.parametrize("factor", [1.0, np.nan], ids=["the initial weights", "NaN"])
@pytest.mark.parametrize("check", ARRANGEMENTS, ids=lambda check: check.name)
def test_weights_that_no_step_moved_are_not_the_same_in_two_arrangements(check, factor):
    class Idle(Adapter):
        def update(self, case):
            return {name: factor * weight for name, weight in initial_weights(case["model"]).items()}

    with pytest.raises(Deviation, match=r"the largest change of a weight is (0|nan)"):
        check.run(Idle())


def test_one_weight_that_is_not_finite_is_no_update():
    case = update.chosen(update.load("ppo"), update.REFERENCE)
    found = {name: weight.copy() for name, weight in update.updated(update.REFERENCE, case).items()}
    found["value_head.weight"].flat[0] = np.nan
    with pytest.raises(Deviation, match="is nan"):
        update.compare_weights(found, found, case)


CALLS = [*vectors.checks(), *metamorphic.checks()]


@pytest.mark.parametrize("check", CALLS, ids=lambda check: check.name)
def test_no_check_lacks_a_case_for_a_trainer_that_claims_everything(check):
    check.run(Adapter())


@pytest.mark.parametrize(("name", "profile"), [("gspo", {"ratio": "token"}), ("rloo", {"baseline": "grpo"})])
def test_an_update_by_another_algorithm_is_not_taken_for_the_one_of_the_case(name, profile):
    adapter = Adapter()
    adapter.profile = {**Adapter.profile, **profile}
    with pytest.raises(NotOffered, match="the profile does not claim"):
        update.check_whole(name, adapter)
