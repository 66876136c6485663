"""Fine-tuning end to end: from a model folder and rows to a trained model folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge.config import load_config
from kedge.data import Demonstration, encode_prompt
from kedge.models import LanguageModel, TokenRows, load_tokenizer
from kedge.models.packing.trunk import Trunk
from kedge.runs.run import Resume
from kedge.stages import sft
from kedge.stages.sft import run_sft, train_sft
from kedge.training.supervised.loop import Outcome
from kedge_base.errors import ConfigError, DataError, KedgeError, OutputError
from kedge_base.run_folder.record_format import MEASURED, read_metrics
from kedge_base.stage import Stage
from kedge_inspect.page.verdict import data_sentences
from kedge_inspect.record import read_run
from tests.forking import forked_kedge
from tests.lab.evaluation.speakers import run_kedge
from tests.tiny import save_tiny_policy, tiny_causal_lm, tiny_tokenizer

ROWS = [{"prompt": f"Hoist sail {number}!", "completion": f" Aye, {number}."} for number in range(10)]
SETTINGS = ["sft.learning_rate=0.02", "sft.batch_size=4", "sft.num_epochs=2", "data.eval_fraction=0.2"]


def config_for(tmp_path: Path, out: str = "run", *more: str):
    model = tmp_path / "base"
    if not model.exists():
        save_tiny_policy(model)
    return load_config(
        None,
        [*SETTINGS, "runtime.report=false", *more],
        {"model": str(model), "out": str(tmp_path / out)},
    )


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: row[name] for name in row if not name.startswith(MEASURED)} for row in rows]


def test_a_run_learns_and_leaves_a_folder_that_transformers_loads(tmp_path):
    result = run_sft(
        config_for(tmp_path, "run"),
        demonstrations=ROWS,
    )
    rows = read_metrics(result.folder)
    assert [row["update"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert result.evaluation["loss"] == rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert load_config(result.folder / "config.yaml").sft.learning_rate == 0.02

    tokenizer = AutoTokenizer.from_pretrained(result.model)
    model = AutoModelForCausalLM.from_pretrained(result.model)
    ids = tokenizer(ROWS[0]["prompt"], return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert "fine-tuned" in (result.model / "README.md").read_text(encoding="utf-8")


def test_two_runs_of_one_seed_are_equal_bit_for_bit(tmp_path):
    first, second, other = (
        run_sft(config_for(tmp_path, name, f"runtime.seed={seed}"), demonstrations=ROWS)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert without_times(read_metrics(first.folder)) == without_times(read_metrics(second.folder))
    assert without_times(read_metrics(first.folder)) != without_times(read_metrics(other.folder))
    weights = [AutoModelForCausalLM.from_pretrained(run.model).state_dict() for run in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_activations_that_are_computed_again_change_nothing_but_memory(tmp_path, monkeypatch):
    layers = []
    enabled = Trunk.checkpoint_activations
    monkeypatch.setattr(Trunk, "checkpoint_activations", lambda trunk: layers.append(enabled(trunk)))
    runs = {
        again: run_sft(config_for(tmp_path, again, f"runtime.activation_checkpointing={again}"), demonstrations=ROWS)
        for again in ("false", "true")
    }
    assert len(layers) == 1
    kept, again = (read_metrics(runs[each].folder) for each in runs)
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in kept], abs=1e-4)


@pytest.mark.parametrize("recomputes", [True, False])
def test_whether_activations_are_recomputed_is_decided_once_and_recorded(recomputes, tmp_path, monkeypatch):
    """A resumed run keeps it, whatever the plan says then."""
    plan = SimpleNamespace(recomputes=recomputes, needed=0.0, peak=SimpleNamespace(name="train", bytes=0.0))
    config = config_for(tmp_path, "run", "runtime.activation_checkpointing=auto")
    with pytest.raises(KeyboardInterrupt):
        run_sft(config, demonstrations=ROWS, planned=plan, callback=stop_after_one)
    assert load_config(tmp_path / "run/config.yaml").runtime.activation_checkpointing is recomputes
    monkeypatch.setattr(Stage, "find_plan", lambda stage: pytest.fail("it was planned"))
    resumed = run_sft(config, demonstrations=ROWS, resume=Resume())
    whole = run_sft(
        config_for(tmp_path, "whole", f"runtime.activation_checkpointing={str(recomputes).lower()}"),
        demonstrations=ROWS,
    )
    assert without_times(read_metrics(resumed.folder)) == without_times(read_metrics(whole.folder))


def test_without_a_plan_activations_are_kept(tmp_path):
    config = config_for(tmp_path, "run", "runtime.activation_checkpointing=auto")
    run_sft(config, demonstrations=ROWS)
    assert load_config(tmp_path / "run/config.yaml").runtime.activation_checkpointing is False


def stop_after_one(update):
    if update.number == 1:
        raise KeyboardInterrupt


def test_it_learns_to_stop_though_the_source_pads_with_eos(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    save_tiny_policy(tmp_path / "base", tokenizer=tokenizer)
    tokenizer = load_tokenizer(tmp_path / "base")
    model = LanguageModel(tiny_causal_lm(), tokenizer)
    train_sft(model, tokenizer, [Demonstration("Ready?", " Aye.")] * 8, learning_rate=0.02, num_epochs=15, batch_size=8)
    ids = encode_prompt(tokenizer, "Ready?")
    for _ in range(8):
        ids = [*ids, int(model.logits(model.hidden(TokenRows.of([ids]))[-1]).argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            break
    assert tokenizer.decode(ids) == "Ready? Aye.<eos>"


def test_the_stop_tokens_of_the_base_model_survive(tmp_path):
    config = config_for(tmp_path)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(run_sft(config, demonstrations=ROWS).model)
    assert model.generation_config.eos_token_id == [2, 9, 11]


def test_the_text_of_the_padding_token_is_learned_as_text(tmp_path):
    # As a token it is never sampled: its logit is −1e9, and so was the loss.
    rows = [{"prompt": f"Which token is <pad> {number}?", "completion": f" <pad>, {number}."} for number in range(10)]
    result = run_sft(config_for(tmp_path), demonstrations=rows)
    losses = [row["loss"] for row in read_metrics(result.folder)]
    assert all(0 < loss < 20 for loss in losses)


def test_an_interrupted_run_saves_its_model(tmp_path, monkeypatch):
    steps = []

    def interrupted(*args, on_step, **settings):
        def stop(step, metrics):
            steps.append(step)
            on_step(step, metrics)
            if step == 2:
                raise KeyboardInterrupt

        return train_sft(*args, on_step=stop, **settings)

    monkeypatch.setattr(sft, "train_sft", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sft(config_for(tmp_path), demonstrations=ROWS)
    assert steps == [1, 2]
    assert len(read_metrics(tmp_path / "run")) == 2
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_bad_rows_are_written_to_a_file_and_too_many_stop_the_run(tmp_path, capsys):
    rows = [*ROWS, {"prompt": "No answer"}]
    with pytest.raises(KedgeError, match="1 of 11 rows"):
        run_sft(config_for(tmp_path, "strict"), demonstrations=rows)
    assert [path.name for path in (tmp_path / "strict").iterdir()] == ["rejected.jsonl"]
    result = run_sft(config_for(tmp_path, "lenient", "data.max_rejected_fraction=0.2"), demonstrations=rows)
    rejected = [json.loads(line) for line in (result.folder / "rejected.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rejected] == [11]
    line = "10 of 11 rows used, 2 of them held out; 1 dropped: field 'completion' is missing"
    said = capsys.readouterr().err
    assert f"demonstrations: {line}\nfirst of the demonstrations, in tokens:\n  prompt  " in said
    assert "trained on" in said
    assert f"| demonstrations | {line} |" in (result.model / "README.md").read_text(encoding="utf-8")
    record = read_run(result.folder)
    assert record.data["demonstrations"]["dropped"] == {"field 'completion' is missing": 1}
    assert data_sentences(record) == [f"Demonstrations: {line}."]


def test_sources_are_drawn_in_their_shares(tmp_path, monkeypatch):
    for name, rows in (("large", ROWS), ("small", [{"prompt": "Ahoy!", "completion": f" {n}"} for n in range(4)])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    drawn = {}

    def train(model, tokenizer, demonstrations, *, order, **_):
        drawn.update(records=demonstrations, order=order(0))
        return Outcome(1)

    monkeypatch.setattr(sft, "train_sft", train)
    sources = f"data.demonstrations=[{tmp_path}/large.jsonl, {tmp_path}/small.jsonl]"
    result = run_sft(config_for(tmp_path, "run", sources, "data.mix=[1, 3]", "data.eval_fraction=0.2"))
    records, order = drawn["records"], drawn["order"]
    assert len(order) == len(records) < 14
    share = sum(records[row].prompt == "Ahoy!" for row in order) / len(order)
    assert share == pytest.approx(0.75, abs=0.5 / len(order))  # whole rows
    assert "drawn as 25% " in read_run(result.folder).data["demonstrations"]["line"]
    usage = read_run(result.folder).data["demonstrations"]
    assert usage["used"] == usage["rows"] == 14
    only = read_run(run_sft(config_for(tmp_path, "only", sources, "data.mix=[1, 0]", "data.eval_fraction=0.2")).folder)
    usage = only.data["demonstrations"]
    assert usage["used"] - usage["held_out"] == sum(records[row].prompt != "Ahoy!" for row in range(len(records)))
    assert usage["line"].startswith(f"{usage['used']} of 14 rows of ")
    with pytest.raises(DataError, match=r"the share of .*large\.jsonl is less than one of \d+ rows"):
        run_sft(config_for(tmp_path, "tiny", sources, "data.mix=[1e-3, 1]", "data.eval_fraction=0.2"))
    with pytest.raises(ConfigError, match="one of them above 0"):
        config_for(tmp_path, "huge", sources, "data.mix=[1e308, 1e308]")


def test_the_corrected_command_runs_in_the_same_folder(tmp_path):
    with pytest.raises(KedgeError, match="1 of 11 rows"):
        run_sft(config_for(tmp_path), demonstrations=[*ROWS, {"prompt": "No answer"}])
    result = run_sft(config_for(tmp_path), demonstrations=ROWS)
    assert result.folder == tmp_path / "run"
    assert not (result.folder / "rejected.jsonl").exists()


def test_a_mistake_before_the_first_step_leaves_no_folder(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise DataError("too long")

    with monkeypatch.context() as patched:
        patched.setattr(sft, "train_sft", fail)
        with pytest.raises(DataError, match="too long"):
            run_sft(config_for(tmp_path), demonstrations=ROWS)
    assert not (tmp_path / "run").exists()
    run_sft(config_for(tmp_path), demonstrations=ROWS)


def test_a_folder_that_cannot_be_made_is_reported_before_the_model_is_loaded(tmp_path):
    config = load_config(None, SETTINGS, {"model": str(tmp_path / "none"), "out": "/dev/null/run"})
    with pytest.raises(OutputError, match="/dev/null is not a folder"):
        run_sft(config, demonstrations=ROWS)


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError):
        run_sft(config_for(tmp_path), demonstrations=ROWS)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["notes.txt"]


def test_a_text_beyond_the_models_context_is_refused():
    tokenizer = tiny_tokenizer()
    model = LanguageModel(tiny_causal_lm(), tokenizer)
    with pytest.raises(DataError, match="tokens, but the model reads at most 256"):
        train_sft(model, tokenizer, [Demonstration("", "x " * 300)], learning_rate=0.1, batch_size=1)


def test_the_command_runs(tmp_path):
    save_tiny_policy(tmp_path / "base")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    command = ["sft", "--model", tmp_path / "base", "--data", data, "--out", tmp_path / "run", "--seed", "3"]
    done = run_kedge(*command, "sft.batch_size=4", "runtime.report=false")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    again = forked_kedge(*command)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
