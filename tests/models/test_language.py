"""Padding, positions, output layer and forbidden tokens of a language model, against plain transformers calls."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3Config, Olmo3Config, Phi3Config

from kedge.data import encode_completion, encode_text
from kedge.data.chat import end_of_turn
from kedge.models import (
    AdapterSettings,
    LanguageModel,
    TokenRows,
    load_language_model,
    load_tokenizer,
    load_value_head,
    save_policy,
)
from kedge.models.heads import read_values
from kedge.models.language import FORBIDDEN_LOGIT
from kedge.models.pretrained import fuse_activations
from kedge.models.saving import merge
from kedge_base.errors import ConfigError, ModelError
from kedge_hub.card import ModelCard
from tests.models.families import causal_lm
from tests.models.registry.builder import save_policy_folder
from tests.models.registry.tokenizer import word_tokenizer
from tests.tiny import (
    CHAT_TEMPLATE,
    FAMILIES,
    save_tiny_policy,
    tiny_causal_lm,
    tiny_sentencepiece_tokenizer,
    tiny_tokenizer,
)

ROWS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30]]


def padded(rows, width, *, left, fill):
    ids, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, columns], mask[index, columns] = torch.tensor(row), True
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("fill", [0, 2, 123])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_logits_and_values_are_those_of_each_row_alone_however_they_were_padded(family, left, fill, order):
    causal = tiny_causal_lm(family).eval()
    model = LanguageModel(causal, tiny_tokenizer(), value_head=True)
    torch.nn.init.normal_(model.value_head.weight)
    rows = [ROWS[index] for index in order]
    unpadded = TokenRows.unpad(*padded(rows, 9, left=left, fill=fill))
    allowed = ~model.forbidden
    with torch.no_grad():
        hidden = model.hidden(unpadded)
        outputs = model.logits(hidden), read_values(model.value_head, hidden).values
        logits, values = (output.split(unpadded.lengths) for output in outputs)
        for row, its_logits, its_values in zip(rows, logits, values, strict=True):
            alone = causal(input_ids=torch.tensor([row]), output_hidden_states=True)
            torch.testing.assert_close(its_logits[:, allowed], alone.logits[0][:, allowed], atol=1e-5, rtol=1e-5)
            expected = model.value_head(alone.hidden_states[-1][0]).squeeze(-1)
            torch.testing.assert_close(its_values, expected, atol=1e-5, rtol=1e-5)


def test_two_passes_in_training_mode_are_bit_equal_because_dropout_is_off():
    for family in FAMILIES:
        model = LanguageModel(tiny_causal_lm(family), tiny_tokenizer())
        # With activation checkpointing, the layers do run in training mode.
        model.trunk.checkpoint_activations()
        rows = TokenRows.of(ROWS)
        assert torch.equal(model.train().hidden(rows), model.train().hidden(rows)), family
        # Also in transformers' own pass, which kedge never runs in training mode.
        first, second = (model.causal.train()(torch.tensor(ROWS[:1])).logits for _ in range(2))
        assert torch.equal(first, second), family


def test_padding_and_ids_beyond_the_tokenizer_have_probability_zero():
    tokenizer = tiny_tokenizer()
    model = LanguageModel(tiny_causal_lm("llama", len(tokenizer) + 5), tokenizer)
    logits = model.logits(model.hidden(TokenRows.of([[5, 6]])))
    forbidden = [tokenizer.pad_token_id, *range(len(tokenizer), len(tokenizer) + 5)]
    assert (logits[..., forbidden] == FORBIDDEN_LOGIT).all()
    assert (logits.softmax(-1)[..., forbidden] == 0).all()
    assert torch.nonzero(model.forbidden).flatten().tolist() == forbidden


def test_a_tokenizer_without_a_pad_token_of_its_own_gets_a_fresh_one_and_the_embedding_grows(tmp_path):
    for pad in (None, "<eos>"):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = pad
        folder = save_tiny_policy(tmp_path / str(pad), tokenizer=tokenizer)
        loaded = load_tokenizer(folder)
        assert loaded.pad_token_id not in (None, loaded.eos_token_id, loaded.bos_token_id)
        model = load_language_model(folder, tokenizer=loaded)
        assert model.causal.get_input_embeddings().weight.shape[0] == len(loaded)
        assert model.forbidden[loaded.pad_token_id]


def test_the_row_of_a_new_pad_token_is_the_same_in_every_run(tmp_path):
    """Otherwise a policy that `kedge critic` saved with its value head would not be the one that it was fitted to."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    folder = save_tiny_policy(tmp_path / "model", tokenizer=tokenizer)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(1)
    model = load_language_model(folder, tokenizer=tokenizer)
    saved = save_policy(model, tokenizer, tmp_path / "saved", card=ModelCard("critic", "model"))
    torch.manual_seed(2)
    first, again = (load_language_model(each, tokenizer=tokenizer).causal.state_dict() for each in (folder, saved))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=2)])
def test_an_output_layer_that_config_json_alone_calls_tied_is_kept_where_the_embedding_grows(tmp_path, adapter):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<eos>"
    folder = save_tiny_policy(tmp_path / "base", tokenizer=tokenizer)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    tokenizer, row = load_tokenizer(folder), torch.tensor(ROWS[0])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(input_ids=row[None]).logits[0]
    model = load_language_model(folder, tokenizer=tokenizer, adapter=adapter)
    assert len(model.causal.get_input_embeddings().weight) == len(tokenizer) == 301
    saved = save_policy(model, tokenizer, tmp_path / "saved", card=ModelCard("ppo", "base"))
    again = saved if adapter is None else merge(saved, tmp_path / "merged")
    assert json.loads((again / "config.json").read_text())["tie_word_embeddings"] is False
    for found in (model, load_language_model(again, tokenizer=load_tokenizer(again))):
        with torch.no_grad():
            logits = found.logits(found.hidden(TokenRows.of([ROWS[0]])))
        torch.testing.assert_close(logits[:, :300], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pad", ["<unk>", "."])
def test_a_pad_token_that_texts_contain_is_replaced(tmp_path, pad):
    # Padding has probability 0. As the unknown token it is in the ids of any text with an unknown character.
    tokenizer = tiny_sentencepiece_tokenizer()
    tokenizer.unk_token, tokenizer.pad_token = "<unk>", pad
    tokenizer = load_tokenizer(save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer))
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id not in tokenizer.encode("A <unk> sea.")


def test_a_pad_token_that_ends_the_templates_turns_is_replaced(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("{{ eos_token }}", "<|end|>"))
    tokenizer.add_special_tokens({"pad_token": "<|end|>"})
    tokenizer = load_tokenizer(save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer))
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.convert_tokens_to_ids("<|end|>") in encode_text(tokenizer, "answer<|end|>")


def test_a_pad_token_of_its_own_is_kept(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    assert load_tokenizer(folder).pad_token == "<pad>"


def test_a_tokenizer_that_belongs_to_another_model_is_refused(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    with pytest.raises(ModelError, match=r"tokenizer has 310 tokens but the model has 300 .* own tokenizer"):
        load_language_model(folder, tokenizer=tiny_tokenizer(vocab_size=310))


@pytest.mark.parametrize("names", [["<think>"], ["<think>", "</think>"]])
@pytest.mark.parametrize("pad", [None, "<pad>"])
def test_tokens_that_were_added_to_the_tokenizer_alone_are_named_with_the_cure(tmp_path, names, pad):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    folder = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ModelError, match=rf"{len(names)} added tokens? without an embedding, first '<think>'"
    ) as caught:
        load_language_model(folder, tokenizer=load_tokenizer(folder))
    cured = tiny_causal_lm()
    cure = re.search(r"model\.(\w+)\((\d+)\)", str(caught.value))
    getattr(cured, cure[1])(int(cure[2]))
    cured.save_pretrained(folder)
    load_language_model(folder, tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
    ],
)
def test_the_entry_of_a_quantization_that_was_merged_away_is_named(tmp_path, entry):
    folder = save_tiny_policy(tmp_path / "merged")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    with pytest.raises(ModelError, match=rf"quantization_config \({entry['quant_method']}\).* delete this entry"):
        load_language_model(folder, tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_git_lfs_pointer_is_named(tmp_path, file):
    folder = save_tiny_policy(tmp_path / "clone")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4000\n"
    (folder / "pytorch_model.bin").write_text(pointer)  # not read
    load_language_model(folder, tokenizer=load_tokenizer(folder))
    (folder / file).write_text(pointer)
    with pytest.raises(ModelError, match=rf"{file} is a git-lfs pointer.* `git lfs pull`"):
        load_language_model(folder, tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize(
    ("named", "saved"),
    [
        ("PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("TokenizersBackend", "PreTrainedTokenizerFast"),
        (None, "PreTrainedTokenizerFast"),
        ("GPT2TokenizerFast", "GPT2TokenizerFast"),
        ("LlamaTokenizer", "LlamaTokenizer"),
    ],
)
def test_a_tokenizer_is_saved_under_the_class_that_its_source_named(tmp_path, named, saved):
    # transformers 4.57 has no TokenizersBackend, and expects a mapping in extra_special_tokens.
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    folder = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer, extra_rows=1)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": named}))
    loaded = load_tokenizer(folder)
    model = load_language_model(folder, tokenizer=loaded)
    save_policy(model, loaded, tmp_path / "saved", card=ModelCard("sft", "tiny"))
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == saved
    assert config["additional_special_tokens"] == ["<think>"]
    assert "extra_special_tokens" not in config
    again = load_tokenizer(tmp_path / "saved")
    text = "The boat <think> lay\n at anchor."
    assert again.encode(text) == loaded.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text), skip_special_tokens=True) == "The boat  lay\n at anchor."


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)  # GPT-2's output layer is tied to its embedding
def test_a_result_has_the_number_format_and_the_dropout_of_its_source(tmp_path, family, dtype):
    tokenizer = tiny_tokenizer()
    source = save_tiny_policy(tmp_path / "source", family, tokenizer=tokenizer)
    tiny_causal_lm(family).to(dtype).save_pretrained(source)
    model = load_language_model(source, tokenizer=tokenizer)
    card = ModelCard("sft", "tiny")
    result = save_policy(model, tokenizer, tmp_path / "result", card=card)
    before, after = (load_file(each / "model.safetensors") for each in (source, result))
    assert before.keys() == after.keys()
    assert all(tensor.dtype == dtype and torch.equal(tensor, before[name]) for name, tensor in after.items())
    settings = [json.loads((each / "config.json").read_text()) for each in (source, result)]
    for name in [name for name in settings[0] if name == "dtype" or "drop" in name]:
        assert settings[0][name] == settings[1][name], name
    assert any(value for name, value in settings[0].items() if "drop" in name)
    # A checkpoint restores training to the bit.
    checkpoint = save_policy(model, tokenizer, tmp_path / "checkpoint", card=card, final=False)
    assert {tensor.dtype for tensor in load_file(checkpoint / "model.safetensors").values()} == {torch.float32}
    assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_bf16_model_in_fp32_are_not_rounded(tmp_path, family):
    tokenizer = tiny_tokenizer()
    source = save_tiny_policy(tmp_path / "source", family, tokenizer=tokenizer)
    causal = tiny_causal_lm(family)
    tied = {each.data_ptr() for each in (causal.get_input_embeddings().weight, causal.get_output_embeddings().weight)}
    weights = {name: each for name, each in causal.state_dict().items() if name != "lm_head.weight" or len(tied) == 2}
    exact = [name for name in weights if "norm" in name or "ln_" in name]
    # No rounding to bf16 leaves 1 + 2⁻²⁰ as it is.
    tensors = {name: each + 2**-20 if name in exact else each.bfloat16() for name, each in weights.items()}
    parts = [
        {name: each for name, each in tensors.items() if (name in exact) == is_second} for is_second in (False, True)
    ]
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    unread = {"v_head.summary.weight": torch.ones(1, 16)}
    for file, part in zip(files, (parts[0], parts[1] | unread), strict=True):
        save_file(part, source / file, {"format": "pt"})
    places = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (source / "model.safetensors").unlink()
    model = load_language_model(source, tokenizer=tokenizer)
    result = save_policy(model, tokenizer, tmp_path / "result", card=ModelCard("sft", "tiny"))
    after = load_file(result / "model.safetensors")
    assert after.keys() == tensors.keys()
    for name, tensor in after.items():
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name
    assert json.loads((result / "config.json").read_text())["dtype"] == "bfloat16"


def test_outputs_that_a_source_asks_for_are_neither_computed_nor_an_obstacle_to_saving(tmp_path):
    source = save_tiny_policy(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    asked = {"output_attentions": True, "output_hidden_states": True, "return_dict": False}
    (source / "config.json").write_text(json.dumps({**config, **asked}))
    model = load_language_model(source, tokenizer=tiny_tokenizer())
    with torch.no_grad():
        outputs = model.causal(torch.tensor(ROWS[:1]))
    assert (outputs.hidden_states, outputs.attentions) == (None, None)
    save_policy(model, tiny_tokenizer(), tmp_path / "saved", card=ModelCard("sft", "tiny"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.output_attentions is False


def test_a_result_keeps_the_number_format_of_weights_that_transformers_renames(tmp_path):
    source = tmp_path / "source"
    save_policy_folder("minimax_m2", source)
    weights = load_file(source / "model.safetensors")
    exact = [name for name in weights if name.endswith("block_sparse_moe.e_score_correction_bias")]
    stored = {name: each + 2**-20 if name in exact else each.bfloat16() for name, each in weights.items()}
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    model = load_language_model(source, tokenizer=word_tokenizer())
    assert exact
    assert not model.causal.state_dict().keys() & set(exact)
    result = save_policy(model, word_tokenizer(), tmp_path / "result", card=ModelCard("sft", "tiny"))
    for name, tensor in load_file(result / "model.safetensors").items():
        assert (tensor.dtype, torch.equal(tensor, stored[name])) == (stored[name].dtype, True), name


@pytest.mark.parametrize(
    ("rope", "former"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
            {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_rotary_settings_are_also_saved_by_their_names_in_transformers_4(tmp_path, rope, former):
    # transformers 4.57 ignores rope_parameters, and takes its default of 10,000 without a word.
    causal = tiny_causal_lm()
    causal.config.rope_parameters = rope
    model = LanguageModel(type(causal)(causal.config), tiny_tokenizer())
    folder = save_policy(model, tiny_tokenizer(), tmp_path / "policy", card=ModelCard("sft", "tiny"))
    saved = json.loads((folder / "config.json").read_text())
    assert {name: saved.get(name) for name in former} == former
    assert "rope_scaling" in former or "rope_scaling" not in saved
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.config.rope_parameters == rope
    ids = torch.tensor(ROWS[:1])
    assert torch.equal(again(ids).logits, model.causal(ids).logits)


def test_rotary_settings_by_kind_of_layer_and_of_a_text_part_are_also_saved_by_their_former_names(tmp_path):
    full = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}
    former = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    sizes = {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "rope_parameters": rope,
    }  # fmt: skip
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "olmo3": Olmo3Config(**sizes, eos_token_id=2),
        "gemma3": Gemma3Config(text_config=sizes, vision_config={**image, "image_size": 16, "patch_size": 8}),
    }
    for name, config in configs.items():
        model = LanguageModel(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
        folder = save_policy(model, tiny_tokenizer(), tmp_path / name, card=ModelCard("sft", "tiny"))
        saved = json.loads((folder / "config.json").read_text())
        saved = saved.get("text_config", saved)
        assert {key: saved.get(key) for key in former} == former
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert again.config.get_text_config().rope_parameters == rope
    assert saved["rope_local_base_freq"] == 7.0  # of Gemma


def test_a_longrope_embedding_keeps_its_factors(tmp_path):
    """transformers 5 prefers the former name, too; its version 4 refuses all but three entries of Phi-3's."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    for own in ({}, {"factor": 4.0}, {"attention_factor": 1.3}):
        config = Phi3Config(vocab_size=300, pad_token_id=0, rope_parameters={**rope, **own}, **sizes)
        model = LanguageModel(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
        folder = save_policy(model, tiny_tokenizer(), tmp_path / "phi3", card=ModelCard("sft", "tiny"))
        assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {
            "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, **own
        }  # fmt: skip
        ids = torch.tensor(ROWS[:1])
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model.causal(ids).logits)


def test_weights_that_transformers_divides_whenever_it_loads_them_are_refused(tmp_path):
    save_policy_folder("mamba", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rescale_prenorm_residual": True}))
    with pytest.raises(ModelError, match=r"config\.json has rescale_prenorm_residual, .* set it to false"):
        load_language_model(tmp_path, tokenizer=word_tokenizer())


def test_soft_capped_logits_are_capped_as_the_model_itself_does():
    config = Gemma2Config(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    causal = AutoModelForCausalLM.from_config(config).eval()
    model = LanguageModel(causal, tiny_tokenizer())
    with torch.no_grad():
        expected = causal(input_ids=torch.tensor([[5, 6, 7]])).logits[0, :, 1:]
        actual = model.logits(model.hidden(TokenRows.of([[5, 6, 7]])))[:, 1:]
    assert expected.abs().max() <= 0.5
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "no such folder"),
        (lambda folder: folder, "no config.json"),
    ],
)
def test_a_folder_without_a_model_is_one_clear_line(tmp_path, make, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_weights_that_are_pickle_only_are_refused(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    model = tiny_causal_lm()
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*refused; convert it to safetensors"):
        load_language_model(folder, tokenizer=tiny_tokenizer())


def test_missing_weights_are_refused_rather_than_initialized(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights.*model\.norm\.weight"):
        load_language_model(folder, tokenizer=tiny_tokenizer())


def test_an_id_that_the_tokenizer_leaves_out_is_forbidden_and_the_last_one_is_not():
    tokenizer = tiny_tokenizer()
    model = LanguageModel(tiny_causal_lm("llama", len(tokenizer) + 2), tokenizer)
    known = set(tokenizer.get_vocab().values())
    expected = [token not in known or token == tokenizer.pad_token_id for token in range(len(tokenizer) + 2)]
    assert model.forbidden.tolist() == expected


def test_a_value_head_comes_back_with_its_policy(tmp_path):
    tokenizer = tiny_tokenizer()
    model = LanguageModel(tiny_causal_lm(), tokenizer, value_head=True)
    torch.nn.init.normal_(model.value_head.weight)
    folder = save_policy(model, tokenizer, tmp_path / "policy", card=ModelCard("ppo", "tiny"), temperature=0.7)
    head = torch.nn.Linear(16, 1)
    assert load_value_head(head, folder)
    assert torch.equal(head.weight, model.value_head.weight)
    assert not load_value_head(head, tmp_path)
    with pytest.raises(ModelError, match="not a value head"):
        load_value_head(torch.nn.Linear(17, 1), folder)
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.7


def test_a_value_head_is_not_among_the_weights_of_its_policy(tmp_path):
    """vLLM reads every `*.safetensors` beside `config.json` as weights of the policy, and refuses unknown names."""
    model = LanguageModel(tiny_causal_lm(), tiny_tokenizer(), value_head=True)
    folder = save_policy(model, tiny_tokenizer(), tmp_path / "policy", card=ModelCard("ppo", "tiny"))
    (weights,) = folder.glob("*.safetensors")
    assert set(load_file(weights)) <= set(model.causal.state_dict())


@pytest.mark.parametrize("bias", [True, False])
def test_the_value_head_that_llama_factory_saves_beside_a_policy_is_read(tmp_path, bias):
    folder = save_tiny_policy(tmp_path / "policy")
    saved = {"v_head.summary.weight": torch.randn(1, 16), **({"v_head.summary.bias": torch.randn(1)} if bias else {})}
    save_file(saved, folder / "value_head.safetensors", metadata={"format": "pt"})
    head = torch.nn.Linear(16, 1)
    assert load_value_head(head, folder)
    assert torch.equal(head.weight, saved["v_head.summary.weight"])
    assert torch.equal(head.bias, saved.get("v_head.summary.bias", torch.zeros(1)))


@pytest.mark.parametrize("family", ["gpt2", "phi"])
def test_the_fused_activation_is_the_one_that_is_spelled_out(family):
    plain, fused = causal_lm(family), causal_lm(family)
    fuse_activations(fused)
    assert any(isinstance(module, torch.nn.GELU) for module in fused.modules())
    assert not any(isinstance(module, torch.nn.GELU) for module in plain.modules())
    ids = torch.tensor(ROWS[:1])
    outputs = [model(input_ids=ids).logits for model in (plain, fused)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-6)
    for logits in outputs:
        logits.square().mean().backward()
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_loading_fuses_the_activation_and_saving_does_not_show_it(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy", "gpt2")
    model = load_language_model(folder, tokenizer=load_tokenizer(folder))
    assert any(isinstance(module, torch.nn.GELU) for module in model.causal.modules())
    saved = save_policy(model, load_tokenizer(folder), tmp_path / "saved", card=ModelCard("sft", "tiny"))
    configurations = [json.loads((each / "config.json").read_text()) for each in (folder, saved)]
    assert configurations[0]["activation_function"] == configurations[1]["activation_function"] == "gelu_new"


def test_a_forward_pass_leaves_the_models_own_attention_as_it_was():
    model = LanguageModel(tiny_causal_lm(), tokenizer=tiny_tokenizer())
    usual = model.causal.config._attn_implementation
    assert model.trunk.packs(7)
    model.hidden(TokenRows.of(ROWS))
    model.trunk.decoder(ROWS, max_new_tokens=2, pad_id=0).step(torch.tensor([5, 6, 7]))
    assert model.causal.config._attn_implementation == usual


@pytest.mark.parametrize("name", ["eos_token", "unk_token", "pad_token"])
def test_a_special_token_that_is_the_empty_text_counts_as_missing(tmp_path, name):
    """Its id would be the unknown token's: a model would learn to end its answers with that."""
    tokenizer = tiny_sentencepiece_tokenizer()
    tokenizer.unk_token = "<unk>"
    folder = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer)
    path = folder / "tokenizer_config.json"
    for missing in ("", None):
        path.write_text(json.dumps({**json.loads(path.read_text()), name: missing}))
        loaded = load_tokenizer(folder)
        assert (name == "pad_token") == (getattr(loaded, name) == "<|pad|>")
        assert name == "pad_token" or getattr(loaded, name) is None
        if name == "eos_token":
            loaded.chat_template = CHAT_TEMPLATE
            assert end_of_turn(loaded) is None
            with pytest.raises(ModelError, match=r"no end-of-sequence token: set eos_token in its tokenizer_config"):
                encode_completion(loaded, "a")


def test_a_chat_template_is_a_name_or_a_file(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    folder = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer)
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Tides."}]
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}é", encoding="utf-8")

    def rendered(name: str | None, **settings: bool) -> str:
        return str(load_tokenizer(folder, chat_template=name).apply_chat_template(turns, tokenize=False, **settings))

    assert rendered(str(tmp_path / "own.jinja")) == "Why?é"
    assert rendered("zephyr") == "<|user|>\nWhy?<eos>\n<|assistant|>\nTides.<eos>\n"
    chatml = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nTides.<|im_end|>\n"
    assert rendered("chatml") == chatml
    assert rendered("chatml", add_generation_prompt=True) == chatml + "<|im_start|>assistant\n"
    assert rendered(None) == tokenizer.apply_chat_template(turns, tokenize=False)
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "short": "{{ messages[1].content }}"}
    tokenizer.save_pretrained(folder)
    assert rendered("short") == "Tides."
    for wrong, reason in (("chatm", "No such file"), (str(tmp_path), "Is a directory")):
        with pytest.raises(ConfigError, match=f"data.chat_template={wrong} cannot be read: {reason}.* chatml, zephyr"):
            load_tokenizer(folder, chat_template=wrong)
