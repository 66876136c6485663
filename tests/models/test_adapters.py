"""Adapters that PEFT saved, as models: expected values come from PEFT's own pass, without merging."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.config import config_from_settings, load_config
from kedge.models import (
    AdapterSettings,
    LanguageModel,
    ScalarModel,
    autocast,
    load_language_model,
    load_scalar_model,
    load_tokenizer,
    model_width,
    prepacked,
    save_scalar_model,
)
from kedge.models.frozen import hold_bases
from kedge.models.loading import Bases
from kedge.models.packing.rows import TokenRows
from kedge.runs.fingerprint import input_hashes
from kedge_base.errors import ModelError, OutputError
from kedge_hub.card import ModelCard
from tests.models.registry.builder import save_policy_folder, save_reward_folder
from tests.tiny import Family, save_tiny_policy, save_tiny_reward_model, tiny_causal_lm, tiny_tokenizer

ROWS = [[5, 9, 20, 31], [7, 8]]
needs_stacks = pytest.mark.skipif(
    find_spec("peft.utils.transformers_weight_conversion") is None, reason="PEFT 0.18 adapts no stacks of experts"
)


def adapt(base: Path, folder: Path, *, scalar: bool = False, **settings: Any) -> Any:
    """Save an adapter with random weights that change the model, as PEFT does; return PEFT's model."""
    auto, task = (AutoModelForSequenceClassification, "SEQ_CLS") if scalar else (AutoModelForCausalLM, "CAUSAL_LM")
    labels: Any = {"num_labels": 1} if scalar else {}
    torch.manual_seed(3)
    settings = {"target_modules": "all-linear", **settings}
    config = peft.LoraConfig(task_type=task, r=4, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(auto.from_pretrained(base, **labels), config).eval()
    adapted.save_pretrained(str(folder))
    return adapted


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True}, {"use_rslora": True, "lora_alpha": 3}], ids=["lora", "dora", "rslora"]
)
def test_an_adapter_is_its_base_with_the_adapters_weights(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapted = adapt(base, tmp_path / "adapter", **settings)
    tokenizer = load_tokenizer(tmp_path / "adapter")
    assert tokenizer.get_vocab() == load_tokenizer(base).get_vocab(), "the base's"
    model = load_language_model(tmp_path / "adapter", tokenizer=tokenizer)
    hidden = model.hidden(TokenRows.of(ROWS, model.device)).split([4, 2])
    plain = load_language_model(base, tokenizer=tokenizer)
    for row, states in zip(ROWS, hidden, strict=True):
        expected = adapted(input_ids=torch.tensor([row])).logits[0]
        unchanged = plain.causal(input_ids=torch.tensor([row])).logits[0]
        known = ~model.forbidden
        assert torch.allclose(model.logits(states)[:, known], expected[:, known], atol=1e-4, rtol=1e-4)
        assert (expected - unchanged).abs().max() > 0.01, "the adapter does something"
    assert all(weight.requires_grad for weight in model.parameters()), "it can be trained further, as a whole"
    assert model_width(tmp_path / "adapter") == model_width(base)


def test_an_adapter_with_a_head_is_a_reward_model(base: Path, tmp_path: Path) -> None:
    adapted = adapt(base, tmp_path / "adapter", scalar=True)
    adapted.config.pad_token_id = adapted.get_base_model().config.pad_token_id = tiny_tokenizer().pad_token_id
    tokenizer = load_tokenizer(tmp_path / "adapter")
    model = load_scalar_model(tmp_path / "adapter", tokenizer=tokenizer)
    with torch.no_grad():
        scores = model.scores(TokenRows.of(ROWS, model.device))
        expected = [float(adapted(input_ids=torch.tensor([row])).logits[0, 0]) for row in ROWS]
    assert torch.allclose(scores, torch.tensor(expected), atol=1e-4)


@pytest.mark.parametrize(
    ("task", "whole"), [("SEQ_CLS", ["classifier", "score"]), ("SEQ_CLS", None), ("TOKEN_CLS", ["score"]), (None, None)]
)
def test_a_reward_adapter_without_a_head_needs_that_of_its_base(
    base: Path, tmp_path: Path, task: str | None, whole: list[str] | None
) -> None:
    adapt(base, tmp_path / "headless", scalar=True)
    save_tiny_reward_model(tmp_path / "reward")
    adapted = adapt(tmp_path / "reward", tmp_path / "adapter", scalar=True)
    for name in ("headless", "adapter"):
        edit(tmp_path / name, task_type=task, modules_to_save=whole)
        change_weights(tmp_path / name, lambda weights: weights.pop("base_model.model.score.weight"))
    tokenizer = tiny_tokenizer()
    adapted.config.pad_token_id = adapted.get_base_model().config.pad_token_id = tokenizer.pad_token_id
    for given in ({}, {"bases": Bases()}, {"adapter": AdapterSettings(rank=4)}):
        with pytest.raises(ModelError, match="headless' has no trained scalar head"):
            load_scalar_model(tmp_path / "headless", tokenizer=tokenizer, **given)
        if task == "SEQ_CLS":
            with pytest.raises(ModelError, match=r"headless' cannot be merged: neither .* its base has score.weight$"):
                kedge.merge(tmp_path / "headless", tmp_path / "merged")
        model = load_scalar_model(tmp_path / "adapter", tokenizer=tokenizer, **given)
        with torch.no_grad():
            scores = model.scores(TokenRows.of(ROWS, model.device))
            expected = torch.stack([adapted(input_ids=torch.tensor([row])).logits[0, 0] for row in ROWS])
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("whole", "expected"), [(["norm"], 5.0), (["score"], 0.0)])
def test_a_shift_is_that_of_the_head(tmp_path: Path, whole: list[str], expected: float) -> None:
    """Of an adapter without a head of its own, the base's; PEFT knows no shift."""
    tokenizer = load_tokenizer(save_tiny_reward_model(tmp_path / "reward"))
    model = load_scalar_model(tmp_path / "reward", tokenizer=tokenizer)
    model.normalize(mean=5.0)
    base = save_scalar_model(model, tokenizer, tmp_path / "base", card=ModelCard("reward", "base"))
    settings = {"target_modules": ["q_proj"], "modules_to_save": whole}
    config = peft.LoraConfig(r=4, init_lora_weights=False, **settings)  # of no task, for which PEFT would add the head
    peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), config).save_pretrained(
        str(tmp_path / "adapter")
    )
    for bases in (None, Bases()):
        found = load_scalar_model(tmp_path / "adapter", tokenizer=tokenizer, bases=bases)
        assert (float(found.shift), found.trained_here) == (expected, expected == 5.0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT 0.18's, of a tied layer
@pytest.mark.parametrize("whole", [None, ["lm_head"]])
def test_a_critic_can_start_from_the_adapter_of_a_policy(base: Path, tmp_path: Path, whole: list[str] | None) -> None:
    adapt(base, tmp_path / "adapter", modules_to_save=whole)
    policy = load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())
    rows = TokenRows.of(ROWS, policy.device)
    for adapter in (None, AdapterSettings()):
        critic = load_scalar_model(tmp_path / "adapter", tokenizer=tiny_tokenizer(), init="fresh", adapter=adapter)
        assert critic.trunk is not None
        torch.testing.assert_close(critic.trunk.hidden(rows), policy.hidden(rows))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")


def first_infinite(weights: dict[str, torch.Tensor]) -> None:
    next(iter(weights.values()))[0] = torch.inf


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda folder: edit(folder, peft_type="PROMPT_TUNING"), "peft_type is 'PROMPT_TUNING'; kedge supports LORA"),
        (lambda folder: edit(folder, base_model_name_or_path=None), "base_model_name_or_path is missing"),
        (
            lambda folder: edit(folder, base_model_name_or_path="/nowhere"),
            "its base '/nowhere' is not there; set base_model_name_or_path",
        ),
        (
            lambda folder: edit(folder, base_model_name_or_path="/cache/kedge/gguf/c0ffee"),
            "is not there; use the GGUF file that it was read from as a model once, or set base_model_name_or_path",
        ),
        (
            lambda folder: edit(folder, base_model_name_or_path="crew/hull", revision="v1"),
            "its base is 'crew/hull' at revision 'v1', and kedge reads the newest of the branch main; download that",
        ),
        (lambda folder: edit(folder, r=8), "does it belong to"),
        (lambda folder: edit(folder, r="8"), "does it belong to"),
        (lambda folder: edit(folder, base_model_name_or_path=str(folder)), "is also an adapter; merge that first"),
        (lambda folder: edit(folder, alora_invocation_tokens=[5, 6]), "alora_invocation_tokens is set"),
        (lambda folder: edit(folder, layer_replication=[[0, 2]]), "layer_replication is set"),
        (lambda folder: edit(folder, of_a_later_release=True), "of_a_later_release is set"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no"), "safetensors cannot be read"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "no adapter_model.safetensors",
        ),
        (lambda folder: change_weights(folder, lambda weights: weights.popitem()), "is missing in the adapter's file"),
        (
            lambda folder: change_weights(folder, lambda weights: weights.update(more=torch.zeros(1))),
            "more is missing in the base",
        ),
        (lambda folder: change_weights(folder, first_infinite), "contain NaN or infinity"),
    ],
)
def test_what_is_no_adapter_of_the_base_is_refused_in_one_line(
    base: Path, tmp_path: Path, spoil: Any, line: str
) -> None:
    adapt(base, tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with pytest.raises(ModelError) as caught:
        load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


ENDLESS = r"(([a-z_.]+)+)+Q"
MANY = [f"layer_{number}" for number in range(300_000)]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"target_modules": ENDLESS}, "matching target_modules with the names"),
        ({"exclude_modules": ENDLESS}, "matching exclude_modules with"),
        ({"rank_pattern": {ENDLESS: 4}}, "matching rank_pattern with"),
        ({"alpha_pattern": {"(a|b)": 1, ENDLESS: 4}}, "matching alpha_pattern with"),
        ({"modules_to_save": [ENDLESS]}, "matching modules_to_save with"),
        ({"layers_pattern": ENDLESS, "layers_to_transform": [0]}, "matching layers_pattern with"),
        ({"layers_pattern": ["layers", ENDLESS], "layers_to_transform": [0]}, "matching layers_pattern with"),
        # Behind one that is invalid.
        ({"modules_to_save": ["(("], "rank_pattern": {ENDLESS: 4}}, "matching modules_to_save and rank_pattern with"),
        ({"exclude_modules": "*", "modules_to_save": [ENDLESS]}, "matching exclude_modules and modules_to_save with"),
        ({"rank_pattern": {"((": 1, "a{99999999999}": 1, ENDLESS: 4}}, "matching rank_pattern with"),
        ({"rank_pattern": {"(" * 9_000: 1, ENDLESS: 4}}, "matching rank_pattern with"),
        ({"target_modules": ["q_proj", ENDLESS], "ensure_weight_tying": True}, "matching target_modules with"),
        ({"target_modules": MANY}, "target_modules has 300,000 entries; at most 2,000"),
        ({"exclude_modules": MANY}, "exclude_modules has 300,000 entries"),
        ({"modules_to_save": MANY}, "modules_to_save has 300,000 entries"),
        ({"rank_pattern": dict.fromkeys(MANY, 4)}, "rank_pattern has 300,000 entries"),
        ({"r": 10**9}, "its rank is 1000000000, but that of its weights at most 4; does it belong to"),
        ({"rank_pattern": {"q_proj": 10**9}}, "its rank is 1000000000"),
    ],
)
def test_settings_that_would_take_for_ever_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr("kedge.models.adapters.folder.SECONDS", 0.3)
    adapt(base, tmp_path / "adapter")
    edit(tmp_path / "adapter", **settings)
    adapter = AdapterSettings() if "rank_pattern" in settings or "target_modules" in settings else None
    with pytest.raises(ModelError) as caught:
        load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer(), adapter=adapter)
    assert line in str(caught.value)


def test_regular_expressions_of_real_adapters_are_taken(base: Path, tmp_path: Path) -> None:
    """Such as those that unsloth writes."""
    adapt(base, tmp_path / "adapter")
    parts = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    layers = "(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    expected = load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())
    targets = rf"(?:.*?(?:language|text).*?{parts}.*?{layers})|(?:\bmodel\.layers\.[\d]{{1,}}\.{parts}\.{layers})"
    edit(tmp_path / "adapter", target_modules=targets, alpha_pattern={r"layers\.\d+\.never": 3})
    found = load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())
    assert torch.equal(log_probabilities(found), log_probabilities(expected))


def test_an_adapter_of_another_kind_of_model_is_named(base: Path, tmp_path: Path) -> None:
    adapt(base, tmp_path / "language")
    adapt(base, tmp_path / "reward", scalar=True)
    with pytest.raises(
        ModelError, match="reward' is the adapter of a reward model or critic; expected one of a language"
    ):
        load_language_model(tmp_path / "reward", tokenizer=tiny_tokenizer())
    with pytest.raises(
        ModelError, match="language' is the adapter of a language model; expected one of a reward model"
    ):
        load_scalar_model(tmp_path / "language", tokenizer=tiny_tokenizer())


def log_probabilities(model: LanguageModel) -> torch.Tensor:
    rows = TokenRows.of(ROWS, model.device)
    with torch.no_grad():
        return model.logits(model.hidden(rows)).log_softmax(-1)


@needs_stacks
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # PEFT, which uses them
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_stacks_of_experts_are_adapted_saved_and_merged(tmp_path: Path, architecture: str) -> None:
    """With `auto`, PEFT adapts the experts and the router too, which are no linear layers."""
    plain = save_policy_folder(architecture, tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    model = load_language_model(tmp_path / "base", tokenizer=tokenizer, adapter=AdapterSettings(rank=2))
    assert model.adapter is not None
    stacks = {name for name in model.adapter.weights() if ".experts." in name}
    assert stacks
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.adapter.weights().values():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    expected = log_probabilities(model)
    (tmp_path / "adapter").mkdir()
    model.adapter.save(tmp_path / "adapter")
    by_peft = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        logits = by_peft(input_ids=torch.tensor(ROWS[:1])).logits[0]
    known = ~model.forbidden
    found = expected[: len(ROWS[0]), known]
    torch.testing.assert_close(found, logits[:, known].log_softmax(-1), rtol=1e-4, atol=1e-4)
    merged = load_language_model(tmp_path / "adapter", tokenizer=tokenizer)
    torch.testing.assert_close(log_probabilities(merged), expected, rtol=1e-4, atol=1e-4)
    further = load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=AdapterSettings())
    torch.testing.assert_close(log_probabilities(further), expected, rtol=1e-5, atol=1e-5)
    whole = merged.causal.state_dict()
    published = dict(model.adapter.merged())
    assert published.keys() == whole.keys()
    assert all(torch.allclose(weight, whole[name], rtol=1e-5, atol=1e-6) for name, weight in published.items())

    with torch.no_grad():
        for weight in copy.deepcopy(model).parameters():
            weight.zero_()
    assert torch.equal(log_probabilities(model), expected), "a copy has stacks of its own"
    hold_bases([model], "int8")
    assert dict(model.adapter.merged()).keys() == whole.keys()


@needs_stacks
@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")  # PEFT's
def test_names_that_the_model_knows_are_not_converted_again(tmp_path: Path) -> None:
    """Laguna's files have `shared_expert`, its model `shared_experts`, and so do adapters of this model."""
    save_policy_folder("laguna", tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    model = load_language_model(tmp_path / "base", tokenizer=tokenizer, adapter=AdapterSettings(rank=2))
    assert model.adapter is not None
    assert any(".shared_experts." in name for name in model.adapter.weights())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.adapter.weights().values():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    (tmp_path / "adapter").mkdir()
    model.adapter.save(tmp_path / "adapter")
    for adapter in (None, AdapterSettings()):
        found = load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=adapter)
        torch.testing.assert_close(log_probabilities(found), log_probabilities(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["codegen", "gemma3"])
def test_a_base_whose_config_has_no_pad_token_has_adapters(tmp_path: Path, architecture: str) -> None:
    save_policy_folder(architecture, tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    model = load_language_model(tmp_path / "base", tokenizer=tokenizer, bases=Bases(), adapter=AdapterSettings(rank=2))
    assert model.adapter is not None


@needs_stacks
@pytest.mark.parametrize("base_dtype", [None, "bf16", "int8"])
def test_an_adapter_in_the_place_of_a_weight_counts_whatever_holds_the_layer(
    base: Path, tmp_path: Path, base_dtype: Any
) -> None:
    """Such as that of AFMoE's router: PEFT names the weight of a linear layer, and not the layer."""
    adapt(base, tmp_path / "adapter", target_modules=[], target_parameters=["mlp.up_proj.weight"])
    model = load_language_model(tmp_path / "adapter", tokenizer=load_tokenizer(base), adapter=AdapterSettings())
    [owner, *_] = [module for module in model.trunk.model.modules() if hasattr(module, "parameter_name")]
    layer, states = owner.get_base_layer(), torch.randn(3, owner.get_base_layer().in_features)
    plain = torch.nn.functional.linear(states, layer.weight).detach()
    expected = owner(states).detach()
    assert not torch.allclose(plain, expected, rtol=0.1, atol=0.1)
    if base_dtype is not None:
        hold_bases([model], base_dtype)
    for context in (nullcontext(), prepacked(model, "bf16")):
        with autocast("bf16", "cpu"), context, torch.no_grad():
            torch.testing.assert_close(owner(states).float(), expected, rtol=0.02, atol=0.02)
    owner(states).sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in owner.parameters())


@needs_stacks
def test_dora_on_stacks_of_experts_is_refused(tmp_path: Path) -> None:
    save_policy_folder("mixtral", tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    with pytest.raises(ModelError, match=r"a stack of experts cannot have DoRA; use adapter.kind=lora, or name other"):
        load_language_model(tmp_path / "base", tokenizer=tokenizer, adapter=AdapterSettings("dora"))
    settings = AdapterSettings("dora", target_modules=["q_proj", "v_proj"])
    load_language_model(tmp_path / "base", tokenizer=tokenizer, adapter=settings)


@pytest.mark.parametrize(
    ("architecture", "left"),
    [
        ("roberta", "classifier.dense"),
        ("mamba", "mixer.out_proj"),
        ("mamba", "mixer.dt_proj"),
        ("jamba", "mamba.dt_proj"),
        ("longcat_flash", "router.classifier"),
        ("phimoe", "mlp.router"),
        ("llama4_text", "feed_forward.router"),
        ("zamba", "shared_transf"),
        ("gemma3", "vision_tower"),
        ("phi4_multimodal", "embed_tokens_extend"),
        ("bart", "encoder_attn"),
    ],
)
def test_auto_leaves_out_layers_that_cannot_have_an_adapter(tmp_path: Path, architecture: str, left: str) -> None:
    is_encoder = architecture == "roberta"
    (save_reward_folder if is_encoder else save_policy_folder)(architecture, tmp_path / "base")
    load: Any = load_scalar_model if is_encoder else load_language_model
    tokenizer = load_tokenizer(tmp_path / "base")
    model = load(tmp_path / "base", tokenizer=tokenizer, adapter=AdapterSettings(rank=2))
    weights = model.adapter.weights()
    adapted = {name.partition(".lora_")[0] for name in weights if ".lora_" in name}
    assert adapted
    assert not any(left in name for name in adapted)
    if not is_encoder:
        model.logits(model.hidden(TokenRows.of(ROWS, model.device))).log_softmax(-1)[:, 5].sum().backward()
        assert all(weight.grad is not None for weight in weights.values()), "each is read"


def test_auto_takes_layers_of_a_class_of_their_own_that_compute_a_product(tmp_path: Path) -> None:
    save_policy_folder("falcon", tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    model = load_language_model(tmp_path / "base", tokenizer=tokenizer, adapter=AdapterSettings(rank=2))
    assert model.adapter is not None
    assert any("query_key_value.lora_A" in name for name in model.adapter.weights())


@pytest.mark.parametrize(
    ("architecture", "target"),
    [("phimoe", "router"), ("jamba", "dt_proj"), ("longcat_flash", "classifier")],
)
def test_a_layer_that_cannot_have_an_adapter_is_refused_by_name(tmp_path: Path, architecture: str, target: str) -> None:
    save_policy_folder(architecture, tmp_path / "base")
    settings = AdapterSettings(rank=2, target_modules=[target])
    with pytest.raises(ModelError, match=rf"adapter.target_modules: .*\.{target} computes more than a product, or is"):
        load_language_model(tmp_path / "base", tokenizer=load_tokenizer(tmp_path / "base"), adapter=settings)


def test_a_separate_critic_of_an_architecture_without_classifiers_is_refused_as_without_an_adapter(
    tmp_path: Path,
) -> None:
    save_policy_folder("granite", tmp_path)
    for settings in (None, AdapterSettings(rank=2)):
        with pytest.raises(ModelError, match="Granite is not a reward model that transformers knows"):
            load_scalar_model(tmp_path, tokenizer=load_tokenizer(tmp_path), init="fresh", adapter=settings)


def test_an_adapter_on_layers_that_share_a_weight_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_policy_folder("zamba", base)
    tokenizer, line = (
        load_tokenizer(base),
        r"adapter on .*shared_transf.*q_proj.weight, which is one weight with .*q_pr",
    )
    with pytest.raises(ModelError, match=f"adapter.target_modules=.*{line}"):
        load_language_model(base, tokenizer=tokenizer, adapter=AdapterSettings(rank=2, target_modules=["q_proj"]))
    adapt(base, tmp_path / "adapter", target_modules=["q_proj"])
    for adapter in (None, AdapterSettings()):
        with pytest.raises(ModelError, match=f"{tmp_path / 'adapter'}: .*{line}"):
            load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=adapter)


EXPERTS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


@needs_stacks
@pytest.mark.parametrize("architecture", EXPERTS)
def test_an_adapter_of_single_experts_belongs_to_their_stack(tmp_path: Path, architecture: str) -> None:
    """As PEFT saved them before transformers 5: each expert had layers of its own."""
    plain, (part, gate, up, down) = save_policy_folder(architecture, tmp_path / "base"), EXPERTS[architecture]
    generator, saved, expected = torch.Generator().manual_seed(0), {}, {}
    for number, layer in enumerate(cast(Any, plain).model.layers):
        gates_and_ups = layer.mlp.experts.gate_up_proj.detach().clone()
        downs = layer.mlp.experts.down_proj.detach().clone()
        inner = downs.shape[2]
        for expert in range(len(downs)):
            places = {gate: gates_and_ups[expert, :inner], up: gates_and_ups[expert, inner:], down: downs[expert]}
            for name, place in places.items():
                first = torch.randn(2, place.shape[1], generator=generator)
                second = torch.randn(place.shape[0], 2, generator=generator)
                place += 3.0 / 2 * second @ first  # alpha / rank
                layer_name = f"base_model.model.model.layers.{number}.{part}.experts.{expert}.{name}"
                saved |= {f"{layer_name}.lora_A.weight": first, f"{layer_name}.lora_B.weight": second}
        prefix = f"model.layers.{number}.mlp.experts"
        expected |= {f"{prefix}.gate_up_proj": gates_and_ups, f"{prefix}.down_proj": downs}
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "../base", "r": 2, "lora_alpha": 3.0}
    settings |= {"task_type": "CAUSAL_LM", "target_modules": [gate, up, down]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    save_file(saved, tmp_path / "adapter" / "adapter_model.safetensors")
    tokenizer = load_tokenizer(tmp_path / "base")
    merged = load_language_model(tmp_path / "adapter", tokenizer=tokenizer)
    further = load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=AdapterSettings())
    assert further.adapter is not None
    for found in (merged.causal.state_dict(), dict(further.adapter.merged())):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("initialization", ["pissa", "olora"])
def test_an_adapter_that_changes_its_base_is_merged_and_not_trained_further(
    base: Path, tmp_path: Path, initialization: str
) -> None:
    """PEFT subtracts such an adapter's start from the weights of the base, which other roles share."""
    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=initialization)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight += 0.05
    adapted.save_pretrained(str(tmp_path / "adapter"))
    merged = load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())
    row = torch.tensor([ROWS[0]])
    torch.testing.assert_close(merged.causal(input_ids=row).logits, adapted(input_ids=row).logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match=r"its initialization .* changes the weights of its base"):
        load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer(), adapter=AdapterSettings())


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_an_adapter_on_the_embedding_is_refused(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="an adapter on the embedding or the output layer, which kedge does not merge"):
        load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of a tied layer
def test_an_adapter_on_a_tied_output_layer_is_refused(tmp_path: Path) -> None:
    """Merged, it would change the embedding, too."""
    base = save_tiny_policy(tmp_path / "base", family="gpt2")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    with pytest.raises(ModelError, match="an adapter on the embedding or the output layer, which kedge does not merge"):
        load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"target_modules": ["q_proj", "nope"]}, "the model has no layer 'nope'"),
        ({"target_modules": ENDLESS}, "matching target_modules with the names of the model's modules takes over"),
        ({"target_modules": []}, "adapter.target_modules is empty; use auto, or name layers"),
        ({"target_modules": ".*("}, r"adapter.target_modules=\.\*\(: "),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "an adapter on the embedding of tokens"),
    ],
)
def test_a_new_adapter_that_cannot_be_meant_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr("kedge.models.adapters.folder.SECONDS", 0.3)
    with pytest.raises(ModelError, match=line):
        load_language_model(base, tokenizer=tiny_tokenizer(), adapter=AdapterSettings(**settings))


def test_modules_trained_whole_are_those_that_peft_finds(base: Path, tmp_path: Path) -> None:
    """By how their names end: `norm` is every layer's `input_layernorm`, too."""
    settings = AdapterSettings(target_modules=["q_proj"], modules_to_save=["norm"])
    model = load_language_model(base, tokenizer=tiny_tokenizer(), adapter=settings)
    assert model.adapter is not None
    with torch.no_grad():
        for weight in model.adapter.weights().values():
            weight += 0.1
    (tmp_path / "adapter").mkdir()
    model.adapter.save(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter")).eval()
    row = torch.tensor([ROWS[0]])
    torch.testing.assert_close(model.causal(input_ids=row).logits, plain(input_ids=row).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of excluded modules
@pytest.mark.parametrize("excluded", [None, ["layers.1.self_attn.q_proj"], r".*layers\.1\.self_attn\.q_proj"])
def test_a_linear_layer_that_is_trained_whole_has_no_adapter(base: Path, tmp_path: Path, excluded: Any) -> None:
    """With `auto`, and where PEFT's own adapter names it among its targets."""
    tokenizer, whole = load_tokenizer(base), ["layers.1.mlp.down_proj"]
    settings = AdapterSettings(rank=2, modules_to_save=whole)
    model = load_language_model(base, tokenizer=tokenizer, adapter=settings)
    assert model.adapter is not None
    names = model.adapter.weights().keys()
    assert "model.layers.1.mlp.down_proj.weight" in names
    assert not any("layers.1.mlp.down_proj.lora" in name for name in names)
    assert any("layers.0.mlp.down_proj.lora" in name for name in names)
    targets = ["q_proj", "down_proj"]
    adapt(base, tmp_path / "adapter", target_modules=targets, modules_to_save=whole, exclude_modules=excluded)
    merged, further = (
        load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=adapter)
        for adapter in (None, AdapterSettings())
    )
    torch.testing.assert_close(log_probabilities(further), log_probabilities(merged), rtol=1e-4, atol=1e-4)
    assert further.adapter is not None
    assert any("layers.1.self_attn.q_proj" in name for name in further.adapter.weights()) == (excluded is None)
    (tmp_path / "saved").mkdir()
    further.adapter.save(tmp_path / "saved")
    again = load_language_model(tmp_path / "saved", tokenizer=tokenizer, adapter=AdapterSettings())
    torch.testing.assert_close(log_probabilities(again), log_probabilities(further))


def test_a_trained_copy_of_a_tied_output_layer_is_refused(tmp_path: Path) -> None:
    base = save_tiny_policy(tmp_path / "base", family="gpt2")
    adapt(base, tmp_path / "adapter", fan_in_fan_out=True)
    edit(tmp_path / "adapter", modules_to_save=["lm_head"])
    with pytest.raises(ModelError, match="loses when it merges"):
        load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="are one weight"):
        load_language_model(base, tokenizer=tiny_tokenizer(), adapter=AdapterSettings(modules_to_save=["lm_head"]))


def embeddings(model: LanguageModel | ScalarModel) -> torch.Tensor:
    """The weights that no adapter here changes."""
    assert model.trunk is not None
    return model.trunk.model.get_input_embeddings().weight


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another folder of that name"])
def test_a_base_that_is_named_relative_to_the_adapter_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    (tmp_path / "work" / "here").mkdir(parents=True)
    if other:
        (tmp_path / "work" / "base").mkdir()
    monkeypatch.chdir(tmp_path / "work" / "here")
    save_tiny_reward_model(tmp_path / "base")
    adapt(tmp_path / "base", tmp_path / "adapter", scalar=True)
    edit(tmp_path / "adapter", base_model_name_or_path="../base")
    tokenizer = load_tokenizer(tmp_path / "adapter")
    found, named = (load_scalar_model(tmp_path / name, tokenizer=tokenizer) for name in ("adapter", "base"))
    assert torch.equal(embeddings(found), embeddings(named))


def test_a_folder_is_the_base_at_any_revision(base: Path, tmp_path: Path) -> None:
    adapt(base, tmp_path / "adapter", revision="v1")
    tokenizer = load_tokenizer(base)
    found, named = (load_language_model(folder, tokenizer=tokenizer) for folder in (tmp_path / "adapter", base))
    assert torch.equal(embeddings(found), embeddings(named))


@pytest.mark.parametrize(
    "weights", ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_an_adapter_beside_a_whole_model_is_refused(base: Path, tmp_path: Path, weights: str) -> None:
    """Whether the adapter is in the model already depends on who saved them; transformers with PEFT would add it."""
    adapt(base, tmp_path / "both")
    shutil.copyfile(base / "config.json", tmp_path / "both" / "config.json")
    shutil.copyfile(base / "model.safetensors", tmp_path / "both" / weights)
    loads = (
        lambda: load_tokenizer(tmp_path / "both"),
        lambda: load_language_model(tmp_path / "both", tokenizer=tiny_tokenizer()),
        lambda: load_language_model(tmp_path / "both", tokenizer=tiny_tokenizer(), adapter=AdapterSettings()),
        lambda: load_scalar_model(tmp_path / "both", tokenizer=tiny_tokenizer()),
    )
    for load in loads:
        with pytest.raises(
            ModelError, match=r"both' has a whole model and an adapter \(adapter_config.json\), which may"
        ):
            load()


def test_an_adapter_may_have_the_config_of_its_base_beside_it(base: Path, tmp_path: Path) -> None:
    adapt(base, tmp_path / "adapter")
    expected = load_language_model(tmp_path / "adapter", tokenizer=tiny_tokenizer())
    shutil.copyfile(base / "config.json", tmp_path / "adapter" / "config.json")
    tokenizer = load_tokenizer(tmp_path / "adapter")
    for adapter in (None, AdapterSettings()):
        found = load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=adapter)
        torch.testing.assert_close(log_probabilities(found), log_probabilities(expected))
    assert (kedge.merge(tmp_path / "adapter", tmp_path / "whole") / "model.safetensors").is_file()


@pytest.mark.parametrize("has_weights", [False, True])
def test_an_adapter_on_the_hub_with_a_config_of_its_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_weights: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / f"models--crew--sloop-{has_weights}"
    adapt(base, cached / "snapshots" / "c0ffee")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    for name in ["config.json", *(["model.safetensors"] if has_weights else [])]:
        shutil.copyfile(base / name, cached / "snapshots" / "c0ffee" / name)
    if has_weights:
        with pytest.raises(ModelError, match=r"'crew/sloop-True' has a whole model and an adapter"):
            load_tokenizer("crew/sloop-True")
    else:
        load_language_model("crew/sloop-False", tokenizer=load_tokenizer("crew/sloop-False"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of what it saves
@pytest.mark.parametrize("are_trained", [False, True])
@pytest.mark.parametrize(("family", "layer"), [("llama", "q_proj"), ("gpt2", "c_attn")])
def test_an_adapter_trained_after_tokens_were_added_grows_its_base(
    tmp_path: Path, family: Any, layer: str, are_trained: bool
) -> None:
    """PEFT saves the whole embedding then, whether or not it was trained (`modules_to_save`)."""
    base = save_tiny_policy(tmp_path / "base", family=family)
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens(["<think>", "</think>", "<answer>"])
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    torch.manual_seed(3)
    trained = {"llama": ["embed_tokens", "lm_head"], "gpt2": ["wte"]}[family] if are_trained else None
    settings: Any = {"init_lora_weights": False, "modules_to_save": trained, "fan_in_fan_out": family == "gpt2"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=[layer], **settings)
    adapted = peft.get_peft_model(plain, config).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if any(part in name for part in ("embed_tokens", "lm_head", "wte")):
                weight.add_(0.1 * torch.randn_like(weight))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    tokenizer.save_pretrained(tmp_path / "adapter")
    row = torch.tensor([[5, len(tokenizer) - 1, 9]])
    expected = adapted(input_ids=row).logits
    own = load_tokenizer(tmp_path / "adapter")
    found = load_language_model(tmp_path / "adapter", tokenizer=own)
    torch.testing.assert_close(found.causal(input_ids=row).logits, expected, atol=1e-5, rtol=1e-5)
    on_bases = load_language_model(tmp_path / "adapter", tokenizer=own, bases=Bases())  # as a frozen reference
    torch.testing.assert_close(on_bases.causal(input_ids=row).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelError, match=r"tokens were added before it was trained.* merge it \(kedge merge\)"):
        load_language_model(tmp_path / "adapter", tokenizer=own, adapter=AdapterSettings())
    merged = kedge.merge(tmp_path / "adapter", tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(again(input_ids=row).logits, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_on_the_hub_is_found_in_the_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--crew--ship-lora"
    adapt(base, cached / "snapshots" / "c0ffee")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    tokenizer = load_tokenizer("crew/ship-lora")
    found, expected = (
        load_language_model(source, tokenizer=tokenizer)
        for source in ("crew/ship-lora", cached / "snapshots" / "c0ffee")
    )
    weights = dict(expected.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in found.named_parameters())
    with pytest.raises(ModelError, match="not in the cache"):
        load_tokenizer("crew/other-lora")


@pytest.mark.parametrize("scalar", [False, True])
def test_a_merged_adapter_is_a_model_that_needs_no_peft(tmp_path: Path, scalar: bool) -> None:
    base, dtype = save_tiny_policy(tmp_path / "base"), torch.float32 if scalar else torch.bfloat16
    tiny_causal_lm().to(dtype).save_pretrained(base)
    adapt(base, tmp_path / "adapter", scalar=scalar)
    result = CliRunner().invoke(app, ["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "whole")])
    assert result.exit_code == 0, result.output
    assert not list((tmp_path / "whole").glob("adapter*"))
    assert not (tmp_path / "whole" / "README.md").exists(), "PEFT's card says that the model is an adapter"
    load = load_scalar_model if scalar else load_language_model
    one, other = (
        load(folder, tokenizer=load_tokenizer(folder)) for folder in (tmp_path / "adapter", tmp_path / "whole")
    )
    weights = dict(other.named_parameters())
    assert weights
    # The merged model has the number format of the base.
    assert all(torch.equal(weight.to(dtype).float(), weights[name]) for name, weight in one.named_parameters())
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    with pytest.raises(ModelError, match="is not an adapter"):
        kedge.merge(tmp_path / "whole", tmp_path / "again")
    with pytest.raises(OutputError):
        kedge.merge(tmp_path / "adapter", tmp_path / "whole")


def test_the_base_is_one_of_the_files_that_a_run_depends_on(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    adapt(tmp_path / "base", tmp_path / "adapter")
    config = config_from_settings("sft", {"model": str(tmp_path / "adapter"), "demonstrations": "none.jsonl"})
    before = input_hashes(config)["model"]
    with (tmp_path / "base" / "model.safetensors").open("ab") as file:
        file.write(b"0")
    assert input_hashes(config)["model"] != before


def test_a_setting_of_the_adapter_alone_means_lora_and_may_be_idle_with_none() -> None:
    assert load_config(overrides=["adapter.rank=4"]).adapter.kind == "lora"
    assert load_config(overrides=["adapter.rank=16"]).adapter.kind == "none"  # the default, which a run has recorded
    config = load_config(overrides=["adapter.rank=4", "adapter.kind=none"])
    assert (config.adapter.rank, config.adapter.kind) == (4, "none")
    assert load_config(overrides=["adapter.kind=dora", "adapter.rank=4"]).adapter.kind == "dora"
    assert load_config().adapter.kind == "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # with an output layer of its own, and a tied one
def test_a_merge_with_a_row_for_the_pad_token_is_pefts_to_the_bit(
    tmp_path: Path, family: Family, dtype: torch.dtype
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    base = tmp_path / "base"
    tiny_causal_lm(family, len(tokenizer)).to(dtype).save_pretrained(base)
    tokenizer.save_pretrained(base)
    adapt(base, tmp_path / "adapter", fan_in_fan_out=family == "gpt2")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    expected: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).merge_and_unload().eval()
    found: Any = AutoModelForCausalLM.from_pretrained(
        kedge.merge(tmp_path / "adapter", tmp_path / "whole"), dtype="auto"
    )
    row = torch.tensor([ROWS[0]])
    assert found.dtype == dtype
    assert found.config.vocab_size == len(tokenizer) + 1
    assert torch.equal(found.eval()(input_ids=row).logits[..., :-1], expected(input_ids=row).logits)
