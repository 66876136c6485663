"""The four models of PPO (policy, reference, critic, reward model): loading, heads, forward pass, saving."""

from kedge.models.adapters import AdapterSettings
from kedge.models.frozen import FrozenDtype, HostWeights, hold_frozen
from kedge.models.heads import HistogramHead, ValueHead, initialize_head, load_value_head, read_values
from kedge.models.language import ActorCritic, LanguageModel, PolicyWeights, response_logprobs
from kedge.models.loading import load_language_model, load_scalar_model
from kedge.models.packing.decoders import Decoder
from kedge.models.packing.packed import PackedDecoder
from kedge.models.packing.rows import TokenRows
from kedge.models.precision import Precision, autocast, prepacked, resolve_precision
from kedge.models.pretrained import freeze_attention, model_width
from kedge.models.saving import save_architecture, save_policy, save_scalar_model
from kedge.models.scalar import ScalarModel, score_rows
from kedge.models.sources import find_model
from kedge.models.tokenizers import StopTokens, load_tokenizer, named_stop_tokens, own_stop_tokens

__all__ = [
    "ActorCritic",
    "AdapterSettings",
    "Decoder",
    "FrozenDtype",
    "HistogramHead",
    "HostWeights",
    "LanguageModel",
    "PackedDecoder",
    "PolicyWeights",
    "Precision",
    "ScalarModel",
    "StopTokens",
    "TokenRows",
    "ValueHead",
    "autocast",
    "find_model",
    "freeze_attention",
    "hold_frozen",
    "initialize_head",
    "load_language_model",
    "load_scalar_model",
    "load_tokenizer",
    "load_value_head",
    "model_width",
    "named_stop_tokens",
    "own_stop_tokens",
    "prepacked",
    "read_values",
    "resolve_precision",
    "response_logprobs",
    "save_architecture",
    "save_policy",
    "save_scalar_model",
    "score_rows",
]
