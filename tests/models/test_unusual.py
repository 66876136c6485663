"""Architectures that break a shortcut: each is right, whatever the batch, or refused in one line when it is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    BigBirdConfig,
    ConvBertConfig,
    CTRLConfig,
    FalconH1Config,
    FNetConfig,
    FunnelConfig,
    Llama4TextConfig,
    MiniMaxConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    NystromformerConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2PreTrainedModel,
    RecurrentGemmaConfig,
    RobertaConfig,
    T5Config,
    XLMConfig,
    XLNetConfig,
    YosoConfig,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from kedge.algorithm.experience import Rollout
from kedge.models import LanguageModel, ScalarModel, TokenRows, load_scalar_model, load_tokenizer
from kedge.models.live_bytes import LiveBytes
from kedge.models.packing.decoders import GroupedDecoder, PaddedDecoder
from kedge.models.packing.packed import PackedDecoder
from kedge.models.precision import autocast
from kedge.models.scalar import find_batching, score_rows
from kedge.rollout import Sampler
from kedge_base.errors import ModelError
from tests.tiny import tiny_causal_lm, tiny_tokenizer

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 300}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3, **SPECIAL}
WIDE = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 64}
GROUPED = {**WIDE, "num_key_value_heads": 1}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
SWITCH, TEMPERATURE = 12, 0.3
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 6.0, 8.0, 10.0],
    "original_max_position_embeddings": SWITCH,
}
LENGTHS = (5, 17, 3, 9, 5)
ROWS = [[7 + (13 * row + 5 * place) % 290 for place in range(length)] for row, length in enumerate(LENGTHS)]


def build(config: PreTrainedConfig, auto_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A random model, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto_class.from_config(config).eval()


def policy(config: PreTrainedConfig) -> LanguageModel:
    return LanguageModel(build(config), tiny_tokenizer())


def alone(causal: PreTrainedModel, row: list[int]) -> torch.Tensor:
    """The oracle: transformers' log probabilities of a row that shares its batch with no other."""
    return causal(input_ids=torch.tensor([row]), use_cache=False).logits[0].float().log_softmax(-1)


def assert_rows_alone(model: LanguageModel, rows: list[list[int]] = ROWS) -> None:
    with torch.no_grad():
        hidden = model.hidden(TokenRows.of(rows)).split([len(row) for row in rows])
        for states, row in zip(hidden, rows, strict=True):
            ours = model._raw_logits(states, model._output_weight()).log_softmax(-1)
            torch.testing.assert_close(ours, alone(model.causal, row), atol=1e-4, rtol=1e-4)


def assert_sampled(model: LanguageModel) -> None:
    """The noted log probabilities are those of whole passes, although rows stop and are dropped on the way."""
    prompts = [row[:5] for row in ROWS for _ in range(3)]

    def sample(*stop_tokens: int) -> Rollout:
        sampler = Sampler(model, pad_id=0, stop_tokens=stop_tokens, max_new_tokens=12, temperature=TEMPERATURE)
        return sampler.generate(prompts, seeds=range(len(prompts)))

    unstopped = sample().response_ids
    num_rows = torch.tensor([int((unstopped[:, :9] == token).any(dim=1).sum()) for token in range(300)])
    rollout = sample(int(num_rows.argmax()))
    assert 4 <= int(rollout.stopped.sum()) < len(prompts)
    for row, prompt in enumerate(prompts):
        response = rollout.response_ids[row][rollout.action_mask[row]]
        with torch.no_grad():
            logits = model.causal(input_ids=torch.tensor([[*prompt, *response.tolist()]]), use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1].masked_fill(model.forbidden, -1e9) / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.logprobs[row][rollout.action_mask[row]], expected, atol=1e-4, rtol=1e-4)


def test_rows_on_both_sides_of_a_rotary_switch_do_not_change_each_other():
    model = policy(Phi3Config(**GROUPED, original_max_position_embeddings=SWITCH, rope_parameters=LONGROPE))
    assert min(LENGTHS) < SWITCH < max(LENGTHS)
    assert_rows_alone(model)


def test_no_response_is_sampled_across_a_rotary_switch():
    model = policy(Phi3Config(**GROUPED, original_max_position_embeddings=SWITCH, rope_parameters=LONGROPE))
    assert (model.context_length, model.sampling_length) == (64, SWITCH)
    model.trunk.decoder([ROWS[0]], max_new_tokens=SWITCH - 5, pad_id=0)
    with pytest.raises(ModelError, match=f"rotary embedding changes at {SWITCH} tokens"):
        model.trunk.decoder([ROWS[0]], max_new_tokens=SWITCH - 4, pad_id=0)


def test_rows_within_the_range_of_dynamic_scaling_are_those_of_plain_transformers():
    """Beyond `max_position_embeddings`, the frequencies would depend on the longest row so far: that is the context."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = policy(Qwen2Config(**{**GROUPED, "max_position_embeddings": 17}, rope_parameters=dynamic))
    assert model.context_length == model.sampling_length == max(LENGTHS)
    assert_rows_alone(model)


def test_a_recurrent_state_is_dropped_with_its_row():
    model = policy(
        FalconH1Config(**GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=4)
    )
    assert_rows_alone(model)
    assert_sampled(model)


def test_a_model_that_left_padding_changes_is_sampled_by_prompt_length():
    config = Llama4TextConfig(
        **GROUPED, intermediate_size_mlp=32, head_dim=8, num_local_experts=2, attention_chunk_size=8
    )
    model = policy(config)
    assert_rows_alone(model)
    assert_sampled(model)


@torch.no_grad()
def test_long_rows_are_sampled_by_prompt_length_if_their_attention_counts_the_padding():
    model = policy(
        Llama4TextConfig(
            **GROUPED, intermediate_size_mlp=32, head_dim=8, num_local_experts=2, floor_scale=24, no_rope_layers=[1, 0]
        )
    )
    rows = [[*range(3, 23)], [7, 8]]
    assert isinstance(model.trunk.decoder(rows, max_new_tokens=4, pad_id=0), PaddedDecoder)
    decoder = model.trunk.decoder(rows, max_new_tokens=20, pad_id=0)
    for token in range(30, 50):
        decoder.step(torch.tensor([token, token]))
    whole = [torch.tensor([[*row, *range(30, 50)]]) for row in rows]
    expected = torch.cat([model.trunk.model(input_ids=row, use_cache=False).last_hidden_state[:, -1] for row in whole])
    torch.testing.assert_close(decoder.hidden, expected, atol=1e-4, rtol=1e-4)


def test_groups_by_prompt_length_are_one_batch():
    model = policy(Qwen2Config(**GROUPED))
    prompts = [ROWS[0], ROWS[2], ROWS[1][:9], ROWS[4], ROWS[3]]
    grouped = GroupedDecoder(lambda rows: PackedDecoder(model.trunk.model, rows, max_new_tokens=9), prompts)
    whole = PackedDecoder(model.trunk.model, prompts, max_new_tokens=9)
    tokens = torch.arange(20, 40)
    for step, kept in enumerate(([0, 1, 2, 3, 4], [4, 2, 0], [1, 2], [1])):
        for decoder in (grouped, whole):
            decoder.keep(torch.tensor(kept))
            decoder.step(tokens[step : step + len(kept)])
        torch.testing.assert_close(grouped.hidden, whole.hidden, atol=1e-5, rtol=1e-5)


def test_a_cache_of_the_models_own_kind_can_be_sampled_from():
    model = policy(MiniMaxConfig(**EXPERTS, block_size=8, head_dim=8))
    assert_rows_alone(model)
    assert_sampled(model)


def test_a_small_cap_on_the_logits_is_applied():
    config = {**GROUPED, "num_hidden_layers": 3, "lru_width": 16, "head_dim": 8, "attention_window_size": 64}
    model = policy(RecurrentGemmaConfig(**config, logits_soft_cap=0.5, block_types=["recurrent", "attention"]))
    assert_rows_alone(model)


def test_an_unknown_formula_for_the_logits_is_refused_even_if_it_hardly_shows(monkeypatch):
    causal = build(Qwen2Config(**{**GROUPED, "initializer_range": 0.01}))
    usual = type(causal).forward

    def capped(self, *args, **inputs):
        output = usual(self, *args, **inputs)
        output.logits = 30.0 * (output.logits / 30.0).tanh()
        return output

    plain = causal(torch.tensor([ROWS[0]])).logits
    monkeypatch.setattr(type(causal), "forward", capped)
    causal.config.name_of_this_test = "capped"
    torch.testing.assert_close(causal(torch.tensor([ROWS[0]])).logits, plain, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelError, match="computes its logits in a way that kedge does not support"):
        LanguageModel(causal, tiny_tokenizer())


def test_an_output_layer_may_start_at_0():
    causal = build(Qwen2Config(**GROUPED, rms_norm_eps=1.3e-6))  # a configuration that no other test has probed
    torch.nn.init.zeros_(causal.lm_head.weight)
    assert_rows_alone(LanguageModel(causal, tiny_tokenizer()))


def test_a_trunk_that_the_model_calls_in_part_is_supported():
    assert_rows_alone(policy(OPTConfig(**{**SIZES, "ffn_dim": 32}, word_embed_proj_dim=16, max_position_embeddings=64)))


def test_a_decoder_that_is_wrapped_is_supported():
    """The wrapper names no embedding of its own."""
    widths = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "decoder_layers": 2}
    assert_rows_alone(policy(BartConfig(vocab_size=300, d_model=16, max_position_embeddings=64, **widths)))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BertConfig(**WIDE), "reads later tokens"),
        (XLMConfig(emb_dim=16, n_layers=2, n_heads=2, n_words=300, pad_index=0, max_position_embeddings=64), "XLM"),
        (ModernBertDecoderConfig(**WIDE), "computes its logits"),
    ],
    ids=["encoder", "position by padding", "head"],
)
def test_a_model_that_cannot_be_right_is_refused_in_one_line(config, reason):
    with pytest.raises(ModelError, match=reason) as refusal:
        policy(config)
    assert "\n" not in str(refusal.value)


def test_a_model_that_cannot_be_sampled_is_refused_before_a_run():
    model = policy(
        RecurrentGemmaConfig(
            **{**GROUPED, "num_hidden_layers": 3}, lru_width=16, head_dim=8, block_types=["recurrent", "attention"]
        )
    )
    with pytest.raises(ModelError, match="cannot be sampled from"):
        model.trunk.check_decoding()


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**EXPERTS, router_jitter_noise=0.5),
        PhimoeConfig(**EXPERTS, router_jitter_noise=0.5, input_jitter_noise=0.5),
    ],
    ids=lambda config: config.model_type,
)
def test_routers_have_no_jitter_under_activation_checkpointing(config):
    model = policy(config)
    model.trunk.checkpoint_activations()
    rows = TokenRows.of(ROWS)
    first, second = model.hidden(rows), model.train().hidden(rows)
    assert torch.equal(first, second)
    assert_rows_alone(model)
    first.sum().backward()
    assert all(weight.grad is not None for weight in model.trunk.model.layers.parameters())


def test_a_checkpointed_pass_keeps_no_copies_of_its_weights():
    """Autocast would keep one of each until the end of the pass."""
    model = LanguageModel(tiny_causal_lm(), tiny_tokenizer())
    model.trunk.checkpoint_activations()
    rows = TokenRows.of([[1, 5, 6]])
    counter = LiveBytes()
    with counter, autocast("bf16", "cpu"):
        counter.hold(model.parameters())
        before = counter.live
        states = model.hidden(rows)
        kept = counter.live - before
        assert torch.is_autocast_cache_enabled()
    weights = sum(weight.numel() for weight in model.trunk.model.layers.parameters())
    assert states.requires_grad
    assert kept < weights  # half of the copies, which have 2 bytes each


def test_a_model_without_activation_checkpointing_says_so():
    model = policy(CTRLConfig(n_embd=16, dff=32, n_layer=2, n_head=2, n_positions=64, **SPECIAL))
    with pytest.raises(ModelError, match="CTRLModel: it has no activation checkpointing; set runtime"):
        model.trunk.checkpoint_activations()


class TwoLayerHead(Qwen2PreTrainedModel):
    """A reward model whose head is not one linear layer, as Qwen2.5-Math-RM's."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.num_labels, self.model = 1, AutoModel.from_config(config)
        width = config.hidden_size
        self.score = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        scores = self.score(self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        places = torch.arange(input_ids.shape[1]) * (input_ids != self.config.pad_token_id)
        last = places.argmax(-1)
        return SequenceClassifierOutput(logits=scores[torch.arange(len(last)), last])


ENCODER = {**WIDE, "num_labels": 1}
TEXT_SCORERS = {
    "two layers": Qwen2Config(**{**GROUPED, "pad_token_id": 299}, num_labels=1),
    "ModernBERT decoder": ModernBertDecoderConfig(**{**ENCODER, "pad_token_id": 299}),
    "CTRL": CTRLConfig(n_embd=16, dff=32, n_layer=2, n_head=2, n_positions=64, num_labels=1, **SPECIAL),
    "BERT": BertConfig(**ENCODER),
    "FNet": FNetConfig(**{**ENCODER, "num_attention_heads": None}),
    "Nyströmformer": NystromformerConfig(**ENCODER, num_landmarks=64, segment_means_seq_len=64),
    "ConvBERT": ConvBertConfig(**ENCODER, head_ratio=1, num_groups=1),
    # Its configuration has no field for the end of a text.
    "Funnel": FunnelConfig(
        vocab_size=300, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=32, num_labels=1, pad_token_id=0
    ),
    "XLNet": XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=32, initializer_range=0.3, num_labels=1, **SPECIAL),
}


@pytest.mark.parametrize("name", TEXT_SCORERS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 4, 1, 0, 2)])
def test_a_score_does_not_depend_on_the_other_texts(name, order):
    config = TEXT_SCORERS[name]
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    if name == "two layers":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            classifier = TwoLayerHead(config).eval()
    else:
        classifier = build(config, AutoModelForSequenceClassification)
    model = ScalarModel(classifier, tokenizer)
    rows = [[*ROWS[row], 2] for row in order]
    with torch.no_grad():
        expected = torch.cat([classifier(input_ids=torch.tensor([row])).logits[0] for row in rows])
        assert expected.std() > 1e-3
        torch.testing.assert_close(model.scores(TokenRows.of(rows)), expected, atol=1e-5, rtol=1e-4)


def test_short_texts_are_not_padded_to_the_longest_one():
    classifier = build(TEXT_SCORERS["BERT"], AutoModelForSequenceClassification)
    model = ScalarModel(classifier, tiny_tokenizer())
    read = []
    classifier.register_forward_pre_hook(lambda *call: read.append(call[2]["input_ids"].numel()), with_kwargs=True)
    rows = [ROWS[0], ROWS[1], *[[7, place, 2] for place in range(20)]]
    score_rows(model, rows)
    assert sum(read) <= sum(map(len, rows)) / 0.7  # padded to the longest one, 22 rows of 17 tokens would be read


def test_padding_is_the_tokenizers():
    """A decoder finds a row's last token by the pad id: any other filler would cost it its batches."""
    classifier = build(TEXT_SCORERS["ModernBERT decoder"], AutoModelForSequenceClassification)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(299)
    assert find_batching(ScalarModel(classifier, tokenizer).classifier) == "right"


def test_texts_of_a_trial_have_one_end_each_whatever_the_vocabulary():
    """T5 reads its score there, and refuses a batch of texts that do not have equally many."""
    config = T5Config(
        vocab_size=131, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, num_labels=1, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    assert find_batching(build(config, AutoModelForSequenceClassification)) == "right"


def test_a_reward_model_with_random_scores_is_refused():
    config = YosoConfig(**{**ENCODER, "max_position_embeddings": 66}, use_expectation=False)
    with pytest.raises(ModelError, match=r"cannot score a text|different scores"):
        ScalarModel(build(config, AutoModelForSequenceClassification), tiny_tokenizer())


def test_what_works_is_found_out_in_full_precision():
    model = policy(Qwen2Config(**GROUPED, rms_norm_eps=1.1e-6))  # a configuration that no other test has probed
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoder = model.trunk.decoder([ROWS[0]], max_new_tokens=2, pad_id=0)
        assert isinstance(decoder, PackedDecoder)
        assert policy(Qwen2Config(**GROUPED, rms_norm_eps=1.2e-6)).trunk.packs(17)


@pytest.mark.parametrize("ends", [[2, 5], -1, 9999, None])
def test_a_reward_model_may_declare_any_ends(ends):
    config = Qwen2Config(**GROUPED, num_labels=1)
    config.eos_token_id = ends
    classifier = build(config, AutoModelForSequenceClassification)
    model = ScalarModel(classifier, tiny_tokenizer())
    with torch.no_grad():
        expected = torch.cat([classifier(input_ids=torch.tensor([row])).logits[0] for row in ROWS])
        torch.testing.assert_close(model.scores(TokenRows.of(ROWS)), expected, atol=1e-5, rtol=1e-4)


def test_texts_on_both_sides_of_a_rotary_switch_do_not_change_each_others_scores():
    longrope = {**LONGROPE, "original_max_position_embeddings": 16}  # the trial rows are on one side of it
    config = Phi3Config(**GROUPED, original_max_position_embeddings=16, rope_parameters=longrope, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        classifier = TwoLayerHead(config).eval()
    model = ScalarModel(classifier, tiny_tokenizer())
    assert model.batching == "right"
    rows = [[*ROWS[1], 2, 2, 2], *ROWS]
    with torch.no_grad():
        expected = torch.cat([classifier(input_ids=torch.tensor([row])).logits[0] for row in rows])
        torch.testing.assert_close(model.scores(TokenRows.of(rows)), expected, atol=1e-5, rtol=1e-4)


def test_the_positions_that_roberta_reserves_for_padding_are_no_context():
    config = RobertaConfig(**{**ENCODER, "pad_token_id": 1, "max_position_embeddings": 20})
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    model = ScalarModel(build(config, AutoModelForSequenceClassification), tokenizer)
    assert model.context_length == 18
    with torch.no_grad():
        assert model.scores(TokenRows.of([ROWS[1] + [7]])).isfinite().all()  # 18 tokens


def test_block_sparse_attention_is_refused_in_one_line(tmp_path):
    config = BigBirdConfig(**ENCODER, attention_type="block_sparse", block_size=4)
    build(config, AutoModelForSequenceClassification).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"block-sparse attention .* set attention_type to original_full"):
        load_scalar_model(tmp_path, tokenizer=load_tokenizer(tmp_path))


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_too_little_memory_is_not_taken_for_an_unsupported_architecture(auto_class, monkeypatch):
    model = build(Qwen2Config(**GROUPED, rms_norm_eps=1.3e-6, num_labels=1), auto_class)
    kind = LanguageModel if auto_class is AutoModelForCausalLM else ScalarModel

    def run_out(*args, **inputs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(model.model, "forward", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        kind(model, tiny_tokenizer())
