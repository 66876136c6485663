"""Mutations of checkpoints, guards, and steps that run out of memory."""

from __future__ import annotations

from tests.mutation import Mutation

CHECKPOINT = "tests/training/checkpoint/test_checkpoint.py"
CRASHES = "tests/training/checkpoint/test_checkpoint_crashes.py"
KEEPER = "tests/training/checkpoint/test_resume.py"
MEMORY = "tests/stages/test_out_of_memory.py"
GUARD = "tests/training/guard/test_guard.py"
SPIKES = "tests/training/guard/test_spikes.py"
OFFENDER = "tests/training/guard/test_nonfinite.py"
WARMUP = "tests/stages/ppo/test_critic_warmup.py"
GUARDING = "tests/stages/ppo/test_guarding.py"
REFUSED = "tests/runs/test_refused_resume.py"
FINISHED = "tests/runs/test_finished_run.py"

ORDER = f"{CRASHES}::test_the_disk_has_every_file_before_the_name_and_the_name_before_anything_goes"

RELIABILITY = (
    Mutation(
        "first-step-of-the-policy-compared-with-the-critics",
        "Trainer.begin",
        "self.guard.forget_steps()",
        "pass",
        f"{WARMUP}::test_the_first_step_of_the_policy_is_no_spike",
    ),
    # Checkpoints: complete or absent.
    Mutation(
        "files-not-synced",
        "write_files",
        "sync(file.fileno())",
        "file.fileno()",
        ORDER,
    ),
    Mutation(
        "folder-not-synced-before-the-rename",
        "save_checkpoint",
        "sync_folder(part)\n\n    with",
        "pass\n\n    with",
        ORDER,
    ),
    Mutation(
        "old-checkpoints-deleted-first",
        "save_checkpoint",
        "                if begun is not None:\n                    fill(Path(begun), in_shards)\n"
        "                    replacing.close()\n                    sync_folder(folder)\n"
        "                _delete_surplus(folder, update=update, keep=keep, protected=protected)\n",
        "                _delete_surplus(folder, update=update, keep=keep, protected=protected)\n"
        "                if begun is not None:\n                    fill(Path(begun), in_shards)\n"
        "                    replacing.close()\n                    sync_folder(folder)\n",
        f"{CHECKPOINT}::test_an_old_one_goes_only_after_the_new_one_is_there",
    ),
    Mutation(
        "one-checkpoint-too-many-kept",
        "_delete_surplus",
        "past[-keep:]",
        "past[-keep - 1 :]",
        f"{CHECKPOINT}::test_the_newest_stay",
    ),
    Mutation(
        "partly-deleted-checkpoint-keeps-its-name",
        "_delete_surplus",
        "path.rename(temporary_name(path))",
        '__import__("shutil").rmtree(path)',
        ORDER,
    ),
    Mutation(
        "broken-checkpoint-counts-as-saved",
        "save_checkpoint",
        "                    open_checkpoint(final)\n",
        "                    if not final.exists():\n                        raise DataError(str(final))\n",
        f"{CHECKPOINT}::test_a_valid_one_of_the_same_update_stays_and_a_broken_one_goes",
    ),
    Mutation(
        "hashes-not-compared",
        "check_files",
        "if record_file(folder / name) != record:",
        "if record_file(folder / name).size != record.size:",
        f"{CHECKPOINT}::test_a_flipped_bit_at_any_byte_is_found[policy.safetensors]",
    ),
    Mutation(
        "converted-weights-taken-for-the-trained",
        "CheckpointModel.write",
        "if saved in stored and _same_bits(stored[saved], groups[group][name])",
        "if saved in stored",
        "tests/training/checkpoint/test_model_folder.py::test_a_weight_that_saving_converts_is_kept_beside_the_model",
    ),
    Mutation(
        "best-checkpoint-not-kept",
        "_delete_surplus",
        "{*past} & {*protected}",
        "set()",
        "tests/stages/ppo/test_held_out.py::test_the_run_ends_when_the_held_out_metric_has_not_improved",
    ),
    Mutation(
        "evaluation-draws-from-the-runs-generators",
        "Measurements._timed",
        "with kept_random_state():",
        "if True:",
        "tests/stages/ppo/test_held_out.py::test_training_is_the_same_to_the_bit_without_evaluation",
    ),
    Mutation(
        "patience-counts-the-warm-up",
        "Updates._finish",
        "if trainer.trains_policy:",
        "if True:",
        "tests/stages/ppo/test_held_out.py::test_patience_begins_when_the_critics_warm_up_has_ended",
    ),
    Mutation(
        "state-read-within-a-seeded-call",
        "random_state",
        "return _outside or _read()",
        "return _read()",
        "tests/base/test_generators.py::test_the_state_during_a_call_in_another_thread_is_that_outside",
    ),
    # Memory that runs out.
    Mutation(
        "half-an-update-saved-when-memory-runs-out",
        "Guard.takes",
        "self.begin_changes()",
        "pass",
        f"{MEMORY}::test_an_update_is_saved_as_long_as_no_step_of_the_next_is_taken[2-saved1]",
    ),
    Mutation(
        "repeated-passes-draw-other-random-numbers",
        "within_memory",
        "restore_random_state(*generators)",
        "pass",
        "tests/ranks/test_budget.py::test_a_repeated_attempt_draws_the_same_random_numbers",
    ),
    Mutation(
        "gradients-of-the-failed-passes-kept",
        "accumulate_gradients",
        "def summed() -> dict[str, float]:\n        begin()",
        "begin()\n\n    def summed() -> dict[str, float]:",
        "tests/training/supervised/test_loop.py::test_gradients_of_passes_before_the_one_that_failed_are_dropped",
    ),
    Mutation(
        "found-tokens-not-saved",
        "stage_loop",
        "if isinstance(run.micro_batch_tokens, AdaptiveTokens):",
        "if False:",
        f"{MEMORY}::test_with_auto_the_step_is_repeated_in_smaller_passes",
    ),
    # The saved state.
    Mutation(
        "boundary-not-remembered",
        "CheckpointedLoop.complete",
        "self.is_changing = False\n        self._run_state.remember()",
        "self.is_changing = False",
        f"{KEEPER}::test_a_step_that_is_dropped_is_taken_again_from_where_it_began",
    ),
    Mutation(
        "interrupted-step-saved",
        "CheckpointedLoop.save",
        "if self.is_changing or not",
        "if not",
        f"{KEEPER}::test_half_a_step_is_never_saved",
    ),
    Mutation(
        "logs-not-synced",
        "RunState._sync_logs",
        "log.sync()",
        "pass",
        f"{KEEPER}::test_the_disk_has_the_rows_before_the_checkpoint_that_knows_of_them",
    ),
    # Runs that are refused, or have finished.
    Mutation(
        "model-saved-after-a-refusal",
        "running",
        "and has_results and run.has_started",
        "and has_results",
        f"{REFUSED}::test_other_prompts_and_a_damaged_log_are_refused_before_anything_changes",
    ),
    Mutation(
        "run-started-before-it-is-restored",
        "CheckpointedLoop.restore",
        "        self._run_state.restore(state)\n        for do in self._when_restored:\n            do()\n",
        "        for do in self._when_restored:\n            do()\n        self._run_state.restore(state)\n",
        f"{REFUSED}::test_other_prompts_and_a_damaged_log_are_refused_before_anything_changes",
    ),
    Mutation(
        "chain-started-before-its-stages",
        "Run.started",
        "if not self.resumed:",
        "if True:",
        f"{REFUSED}::test_a_chain_whose_stage_is_refused_stays_as_it_is",
    ),
    Mutation(
        "inputs-of-a-finished-run-not-compared",
        "check_finished",
        " + changed_since(folder, fingerprint, allowed=allowed)",
        "",
        f"{FINISHED}::test_another_run_is_not_answered_with_its_result",
    ),
    # Non-finite values and spikes.
    Mutation(
        "skips-counted-over-the-whole-run",
        "Guard.watching",
        "self._in_a_row + 1 if self._consequence else 0",
        "self._in_a_row + bool(self._consequence)",
        f"{GUARD}::test_so_many_in_a_row_and_no_more",
    ),
    Mutation(
        "small-ratios-ignored",
        "Guard.check_experience",
        "experience.trainer_logprobs - logprobs, 0.0).abs()",
        "experience.trainer_logprobs - logprobs, 0.0)",
        f"{GUARD}::test_a_token_that_sampler_and_trainer_see_differently_is_named[0.5]",
    ),
    Mutation(
        "spikes-inflate-the-deviation",
        "SpikeDetector.find",
        "NORMAL * median(abs(x - middle) for x in past)",
        "math.sqrt(sum((x - middle) ** 2 for x in past) / len(past))",
        f"{SPIKES}::test_one_spike_in_the_history_hides_no_other",
    ),
    Mutation(
        "wrong-response-blamed",
        "search_minibatch",
        "return max(found, key",
        "return min(found, key",
        f"{OFFENDER}::test_the_response_with_a_gradient_that_is_not_finite_is_found_among_the_others",
    ),
    Mutation(
        "moments-not-rolled-back",
        "RunState._load_weights",
        '        restore_optimizer(state.optimizer, found.stored("optimizer"), found.state["optimizer"])\n',
        "",
        f"{GUARDING}::test_after_a_broken_step_the_weights_are_those_before_or_the_newest_checkpoints[rollback-2-shared]",
    ),
    # The optimizer's state in the host's memory.
    Mutation(
        "restored-state-stays-on-the-device",
        "HostState.load_state_dict",
        "[key] = self._to_host(value)",
        "[key] = value",
        "tests/training/test_host_state.py::test_a_saved_state_is_restored_into_either",
    ),
    Mutation(
        "gradients-lost-in-a-step",
        "HostState.step",
        "parameter.grad = gradient\n",
        "parameter.grad = None if gradient is not None else None\n",
        "tests/training/test_host_state.py::test_gradients_are_there_after_a_step_and_after_one_that_failed",
    ),
)
