"""Mutations of the reliability features: checkpoints, signals, guards, isolated reward functions."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["RELIABILITY"]

CHECKPOINT = "tests/training/checkpoint/test_checkpoint.py"
CRASHES = "tests/training/checkpoint/test_checkpoint_crashes.py"
KEEPER = "tests/training/checkpoint/test_resume.py"
MEMORY = "tests/stages/test_out_of_memory.py"
SCHEDULE = "tests/training/checkpoint/test_save_schedule.py"
STOPPING = "tests/training/test_stopping.py"
GUARD = "tests/training/guard/test_guard.py"
SPIKES = "tests/training/guard/test_spikes.py"
OFFENDER = "tests/training/guard/test_nonfinite.py"
WARMUP = "tests/stages/ppo/test_critic_warmup.py"
GUARDING = "tests/stages/ppo/test_guarding.py"
CALLS = "tests/rewards/test_retries.py"
REMOTE = "tests/rewards/worker/test_client.py"

ORDER = f"{CRASHES}::test_the_disk_has_every_file_before_the_name_and_the_name_before_anything_goes"

RELIABILITY = (
    Mutation(
        "first-step-of-the-policy-compared-with-the-critics",
        "stages/ppo/guarding.py",
        "        guard.forget_steps()",
        "        pass",
        f"{WARMUP}::test_the_first_step_of_the_policy_is_no_spike",
    ),
    # Checkpoints: complete or absent.
    Mutation(
        "files-not-synced",
        "training/checkpoint/hashed_files.py",
        "sync(file.fileno())",
        "file.fileno()",
        ORDER,
    ),
    Mutation(
        "folder-not-synced-before-the-rename",
        "training/checkpoint/store.py",
        "        sync_folder(part)\n",
        "",
        ORDER,
    ),
    Mutation(
        "old-checkpoints-deleted-first",
        "training/checkpoint/store.py",
        "        if not _is_valid(final):\n            _write_atomically(final, write)\n"
        "        _delete_surplus(folder, update=update, keep=keep, protected=protected)\n",
        "        _delete_surplus(folder, update=update, keep=keep, protected=protected)\n"
        "        if not _is_valid(final):\n            _write_atomically(final, write)\n",
        f"{CHECKPOINT}::test_an_old_one_goes_only_after_the_new_one_is_there",
    ),
    Mutation(
        "one-checkpoint-too-many-kept",
        "training/checkpoint/store.py",
        "past[-keep:]",
        "past[-keep - 1 :]",
        f"{CHECKPOINT}::test_the_newest_stay",
    ),
    Mutation(
        "partly-deleted-checkpoint-keeps-its-name",
        "training/checkpoint/store.py",
        '_remove(path.rename(path.with_name(f"{TEMPORARY}old-{path.name}")))',
        "_remove(path)",
        ORDER,
    ),
    Mutation(
        "broken-checkpoint-counts-as-saved",
        "training/checkpoint/store.py",
        "if not _is_valid(final):",
        "if not final.exists():",
        f"{CHECKPOINT}::test_a_valid_one_of_the_same_update_stays_and_a_broken_one_goes",
    ),
    Mutation(
        "hashes-not-compared",
        "training/checkpoint/manifest.py",
        "if record_file(folder / name) != record:",
        "if record_file(folder / name).size != record.size:",
        f"{CHECKPOINT}::test_a_flipped_bit_at_any_byte_is_found[policy.safetensors]",
    ),
    Mutation(
        "converted-weights-taken-for-the-trained",
        "training/checkpoint/model_folder.py",
        "if saved in present and _same_bits(file.get_tensor(saved), tensors[name]):",
        "if saved in present:",
        "tests/training/checkpoint/test_model_folder.py::test_a_weight_that_saving_converts_is_kept_beside_the_model",
    ),
    Mutation(
        "best-checkpoint-not-kept",
        "training/checkpoint/store.py",
        "_update_of(path) in protected",
        "False",
        "tests/stages/ppo/test_held_out.py::test_the_run_ends_when_the_held_out_metric_has_not_improved",
    ),
    Mutation(
        "evaluation-draws-from-the-runs-generators",
        "stages/ppo/evaluating.py",
        "            restore_random_state(*generators)\n",
        "            pass\n",
        "tests/stages/ppo/test_held_out.py::test_training_is_the_same_to_the_bit_without_evaluation",
    ),
    # Memory that runs out.
    Mutation(
        "half-an-update-saved-when-memory-runs-out",
        "stages/ppo/guarding.py",
        "            loop.begin_changes()\n",
        "            pass\n",
        f"{MEMORY}::test_an_update_is_saved_as_long_as_no_step_of_the_next_is_taken",
    ),
    Mutation(
        "repeated-passes-draw-other-random-numbers",
        "system/ranks/budget.py",
        "        _restore_random_states(states)\n",
        "",
        "tests/system/ranks/test_budget.py::test_a_repeated_attempt_draws_the_same_random_numbers",
    ),
    Mutation(
        "gradients-of-the-failed-passes-kept",
        "training/supervised/loop.py",
        "    def summed() -> dict[str, float]:\n        begin()\n",
        "    begin()\n\n    def summed() -> dict[str, float]:\n",
        "tests/training/supervised/test_loop.py::test_gradients_of_passes_before_the_one_that_failed_are_dropped",
    ),
    Mutation(
        "found-tokens-not-saved",
        "stages/ppo/main.py",
        "added = adaptive_part(run.micro_batch_tokens)",
        "added = adaptive_part(None)",
        f"{MEMORY}::test_with_auto_the_step_is_repeated_in_smaller_passes",
    ),
    Mutation(
        "memory-of-the-failed-step-kept",
        "system/memory/exhaustion.py",
        "            traceback.clear_frames(error.__traceback__)\n",
        "            pass\n",
        "tests/system/memory/test_exhaustion.py::test_what_a_failed_function_held_is_freed",
    ),
    # The saved state.
    Mutation(
        "boundary-not-remembered",
        "training/checkpoint/resume.py",
        "        self.done, self._is_changing = step, False\n        self._run_state.remember()\n",
        "        self.done, self._is_changing = step, False\n",
        f"{KEEPER}::test_a_step_that_is_dropped_is_taken_again_from_where_it_began",
    ),
    Mutation(
        "interrupted-step-saved",
        "training/checkpoint/resume.py",
        "if self._is_changing or not",
        "if not",
        f"{KEEPER}::test_half_a_step_is_never_saved",
    ),
    Mutation(
        "logs-not-synced",
        "training/checkpoint/run_state.py",
        "            log.sync()\n",
        "            pass\n",
        f"{KEEPER}::test_the_disk_has_the_rows_before_the_checkpoint_that_knows_of_them",
    ),
    Mutation(
        "minutes-not-restarted",
        "training/checkpoint/save_schedule.py",
        "        self._saved_at = self._clock()\n",
        "        pass\n",
        f"{SCHEDULE}::test_every_m_minutes_since_the_last_save",
    ),
    # Signals.
    Mutation(
        "unlimited-grace-period",
        "training/stopping.py",
        "        _set_timer(grace)\n",
        "",
        f"{STOPPING}::test_a_block_that_never_looks_is_interrupted_when_the_grace_is_over",
    ),
    Mutation(
        "ctrl-c-exits-as-sigterm",
        "training/stopping.py",
        "os._exit(128 + signum)",
        "os._exit(128 + signal.SIGTERM)",
        f"{STOPPING}::test_a_second_signal_ends_the_process_at_once[2-130]",
    ),
    # Non-finite values and spikes.
    Mutation(
        "skips-counted-over-the-whole-run",
        "training/guard/guard.py",
        "self._in_a_row + 1 if self._consequence else 0",
        "self._in_a_row + bool(self._consequence)",
        f"{GUARD}::test_so_many_in_a_row_and_no_more",
    ),
    Mutation(
        "small-ratios-ignored",
        "training/guard/guard.py",
        "experience.trainer_logprobs - logprobs, 0.0).abs()",
        "experience.trainer_logprobs - logprobs, 0.0)",
        f"{GUARD}::test_a_token_that_sampler_and_trainer_see_differently_is_named[0.5]",
    ),
    Mutation(
        "spikes-inflate-the-deviation",
        "training/guard/spikes.py",
        "NORMAL * median(abs(x - middle) for x in past)",
        "math.sqrt(sum((x - middle) ** 2 for x in past) / len(past))",
        f"{SPIKES}::test_one_spike_in_the_history_hides_no_other",
    ),
    Mutation(
        "wrong-response-blamed",
        "training/guard/nonfinite.py",
        "return max(found, key",
        "return min(found, key",
        f"{OFFENDER}::test_the_response_with_a_gradient_that_is_not_finite_is_found_among_the_others",
    ),
    Mutation(
        "moments-not-rolled-back",
        "training/checkpoint/run_state.py",
        '        restore_optimizer(state.optimizer, found.stored("optimizer"), found.state["optimizer"])\n',
        "",
        f"{GUARDING}::test_after_a_broken_step_the_weights_are_those_before_or_the_newest_checkpoints[rollback-2-shared]",
    ),
    # Reward functions.
    Mutation(
        "children-left-alive",
        "system/workers/process.py",
        "os.killpg(process.pid, signal.SIGKILL)",
        "os.kill(process.pid, signal.SIGKILL)",
        f"{REMOTE}::test_a_timeout_kills_the_worker_with_its_children_and_the_next_call_gets_a_new_one",
    ),
    Mutation(
        "deadline-ten-times-too-long",
        "rewards/worker/client.py",
        "deadline = time.monotonic() + seconds",
        "deadline = time.monotonic() + 10 * seconds",
        f"{REMOTE}::test_a_call_ends_at_its_deadline[hangs]",
    ),
    Mutation(
        "ctrl-c-leaves-the-worker-running",
        "system/workers/process.py",
        "except BaseException:  # includes Ctrl-C",
        "except Exception:  # includes Ctrl-C",
        f"{REMOTE}::test_ctrl_c_ends_the_call_and_its_reply_is_not_read_by_the_next",
    ),
    Mutation(
        "reply-to-another-call-accepted",
        "rewards/worker/client.py",
        'while reply.get("id") != number:',
        'while "id" not in reply:',
        f"{REMOTE}::test_the_reply_to_an_abandoned_call_is_skipped",
    ),
    Mutation(
        "worker-not-seeded",
        "rewards/worker/main.py",
        "    random.seed(seed)\n",
        "",
        f"{REMOTE}::test_random_numbers_repeat_with_the_seed",
    ),
    Mutation(
        "workers-outlive-kedge",
        "system/workers/serving.py",
        "    _end_with_kedge(tie)\n",
        "",
        f"{REMOTE}::test_the_worker_ends_when_kedge_is_killed[hangs_in_c_with_a_child]",
    ),
    Mutation(
        "one-retry-too-few",
        "rewards/retries.py",
        "in range(self._limits.retries):",
        "in range(self._limits.retries - 1):",
        f"{CALLS}::test_a_call_that_fails_is_repeated_and_counted",
    ),
    Mutation(
        "one-hang-uses-all-the-time",
        "rewards/retries.py",
        "timeout=remaining / 2)",
        "timeout=remaining)",
        f"{CALLS}::test_one_response_that_hangs_costs_one_score_and_one_more_timeout",
    ),
    Mutation(
        "restored-state-stays-on-the-device",
        "training/host_state.py",
        "[key] = self._to_host(value)",
        "[key] = value",
        "tests/training/test_host_state.py::test_a_saved_state_is_restored_into_either",
    ),
    Mutation(
        "gradients-lost-in-a-step",
        "training/host_state.py",
        "parameter.grad = gradient\n",
        "parameter.grad = None if gradient is not None else None\n",
        "tests/training/test_host_state.py::test_gradients_are_there_after_a_step_and_after_one_that_failed",
    ),
    Mutation(
        "planned-state-on-the-device-though-it-is-elsewhere",
        "plan/optimizer.py",
        "0.0 if self.at_a_time is not None else self._state(figures, role)",
        "self._state(figures, role)",
        "tests/plan/test_machine.py::test_a_state_in_the_hosts_memory_is_on_the_device_in_parts_and_only_in_steps",
    ),
)
