"""The mutations that kedge's tests must detect: a text in a function, its replacement, and the test that fails.

Most are real bugs: from a published listing, a library, or a first draft.
"""

from __future__ import annotations

from tests.mutation import Mutation
from tests.mutation_table_reliability import RELIABILITY

ADVANTAGES = "tests/algorithm/test_advantages.py"
SETTINGS = "tests/stages/ppo/test_settings.py"
CRITIC = "tests/algorithm/test_critic.py"
HISTOGRAM = "tests/algorithm/test_histogram.py"
GROUP_ADVANTAGES = "tests/algorithm/test_group_advantages.py"
KL = "tests/algorithm/test_kl.py"
MASKING = "tests/algorithm/test_masking.py"
POLICY = "tests/algorithm/test_policy_losses.py"
PREFERENCE = "tests/algorithm/test_preference.py"
READOUT = "tests/algorithm/test_readout.py"
STATES = "tests/training/test_readout.py"
CHEAP = "tests/stages/ppo/test_cheap_critics.py"
SHAPING = "tests/algorithm/test_shaping.py"
FITTED_CRITIC = "tests/stages/test_critic.py"
LANGUAGE = "tests/models/test_language.py"
SCALAR = "tests/models/test_scalar.py"
DECODING = "tests/models/packing/test_decoding.py"
LOGPROBS = "tests/algorithm/test_logprobs.py"
CHUNKS = "tests/models/test_chunks.py"
COLLECT = "tests/rollout/test_collect.py"
GROUPS = "tests/algorithm/test_groups.py"
SAMPLING = "tests/stages/ppo/test_sampling.py"
WARMUP = "tests/stages/ppo/test_critic_warmup.py"
SAMPLER = "tests/rollout/test_sampler.py"
DIALOGUES = "tests/rollout/test_dialogues.py"
PLAYER = "tests/rollout/test_player.py"
STOPS = "tests/models/test_stop_tokens.py"
TOKENS = "tests/data/test_tokens.py"
PIECES = "tests/data/test_token_pieces.py"
TRUNK = "tests/models/packing/test_trunk.py"
UNUSUAL = "tests/models/test_unusual.py"
CONTROL = "tests/algorithm/test_control_variate.py"
CREDIT = "tests/rollout/test_credit.py"
TURNS = "tests/algorithm/test_turns.py"
ROWS = "tests/models/packing/test_rows.py"
SHARING = "tests/models/packing/test_sharing.py"
OBJECTIVE = "tests/training/test_objective.py"
OPTIMIZER = "tests/training/test_optimizer.py"
SUPERVISED = "tests/training/supervised/test_losses.py"
UPDATE = "tests/training/test_update.py"
GATE = "tests/test_minimum_gate.py"
MISSING = "tests/rewards/test_missing_eos.py"
READING = "tests/rewards/test_reading.py"
STATISTICS = "tests/algorithm/test_statistics.py"
VERDICTS = "tests/rewards/test_verdicts.py"
ANSWERS = "tests/tasks/verify/test_answers.py"
VERIFIED_TEXTS = "tests/tasks/verify/test_texts.py"
INSTRUCTIONS = "tests/tasks/verify/test_instructions.py"
PROGRAMS = "tests/tasks/verify/test_programs.py"
SANDBOX = "tests/tasks/test_sandbox.py"
PPO = "tests/stages/ppo/test_ppo.py"
ENGINE = "tests/rollout/vllm/test_engine.py"
GRADIENT = "tests/control/test_natural_gradient.py"
TRPO = "tests/control/test_trpo.py"
PREFIXES = "tests/algorithm/test_prefix_test.py"
CONTINUATIONS = "tests/rollout/test_continuations.py"

EACH_TOKEN = "tests/models/test_actor_critic.py::test_each_token_is_evaluated_at_the_position_before_it[llama-shared]"
ALONE = f"{TRUNK}::test_states_and_gradients_are_those_of_each_row_alone"
PACKABLE = f"{TRUNK}::test_what_can_be_packed_is_found_out"
TOKEN_BY_TOKEN = f"{DECODING}::test_reading_token_by_token_is_reading_all_at_once"
DROPPING = f"{DECODING}::test_dropping_rows_leaves_the_others_as_they_are"
ANY_COMPANY = f"{SAMPLER}::test_batch_order_company_and_compaction_change_no_token"
NOTED = f"{SAMPLER}::test_what_is_noted_while_sampling_is_what_the_trainer_computes"
BOTH_AT_ONCE = f"{LOGPROBS}::test_both_at_once_are_what_each_is_alone_in_value_and_gradient"
AGGREGATION = f"{MASKING}::test_aggregation_reproduces_the_published_figures"
QUADRANTS = f"{POLICY}::test_the_quadrants_of_the_clip"

MUTATIONS = (
    # Positions: spec §1.
    Mutation(
        "off-by-one-states",
        "_Reading.of",
        "newest[slots], slots, mask",
        "newest[slots] - 1, slots, mask",
        EACH_TOKEN,
    ),
    Mutation(
        "read-out-without-an-offset",
        "ReadoutSums.solve",
        "return weights, center - mean @ weights",
        "return weights, 0 * (center - mean @ weights)",
        f"{READOUT}::test_parts_add_up_and_the_solution_is_that_of_augmented_least_squares",
    ),
    Mutation(
        "interval-over-responses-of-one-prompt",
        "explained_variance_interval",
        "torch.unique(group.cpu(), return_inverse=True)",
        "torch.unique(torch.arange(len(group)), return_inverse=True)",
        f"{READOUT}::test_the_interval_is_around_the_explained_variance_and_resamples_whole_prompts",
    ),
    Mutation(
        "shift-of-a-critic-lost-on-resuming",
        "Head.load_state_dict",
        'critic.shift.fill_(state["shift"])',
        "pass",
        f"{FITTED_CRITIC}::test_a_run_that_is_interrupted_twice_ends_with_the_same_bits",
    ),
    Mutation(
        "first-answer-instead-of-the-last",
        "marked",
        "lines = reversed(MARKED.findall(text))",
        "lines = MARKED.findall(text)",
        f"{ANSWERS}::test_what_is_no_right_answer_says_why",
    ),
    Mutation(
        "a-number-that-was-cut-off-counts",
        "marked",
        "if (end or is_whole) and",
        "if",
        f"{ANSWERS}::test_a_response_that_was_cut_off_has_only_the_answer_that_is_complete",
    ),
    Mutation(
        "a-hedge-counts-as-its-last-number",
        "final_number",
        "return WRONG_FORMAT  # `#### 41",
        "pass  # `#### 41",
        f"{ANSWERS}::test_what_is_no_right_answer_says_why",
    ),
    Mutation(
        "an-earlier-number-for-one-that-is-malformed",
        "_last_number",
        "numbers = list(QUANTITY.finditer(text))",
        "numbers = [each for each in QUANTITY.finditer(text) if read_quantity(each)]",
        f"{ANSWERS}::test_what_is_no_right_answer_says_why",
    ),
    Mutation(
        "units-do-not-count",
        "Quantity.compared_with",
        'return WRONG_UNIT if reference.unit and self.unit not in ("", reference.unit) else RIGHT',
        "return RIGHT",
        f"{ANSWERS}::test_units_and_forms_of_plain_numbers",
    ),
    Mutation(
        "a-time-limit-that-libraries-catch",
        "deadline",
        "    if has_expired:",
        "    if False:",
        f"{ANSWERS}::test_a_library_that_catches_everything_is_still_stopped",
    ),
    Mutation(
        "the-first-of-several-choices",
        "_with_alternatives",
        "for each in found}",
        "for each in found[:1]}",
        f"{VERIFIED_TEXTS}::test_what_is_no_right_choice_says_why",
    ),
    Mutation(
        "an-unfinished-thought-is-an-answer",
        "final_answer",
        "return None",
        "answer = text",
        "tests/tasks/verify/test_unfinished.py::test_an_unfinished_thought_is_no_answer",
    ),
    Mutation(
        "one-instruction-is-enough",
        "_judge",
        "1 - len(broken) / len(wanted)",
        "1.0 if len(broken) < len(wanted) else 0.0",
        f"{INSTRUCTIONS}::test_all_must_hold_and_partial_gives_the_share",
    ),
    Mutation(
        "expected-values-told-to-the-program",
        "_Reader._is_programs",
        "func=ast.Attribute(value=inner), args=[], keywords=[]",
        "func=ast.Attribute(value=inner), keywords=[]",
        f"{PROGRAMS}::test_the_program_gets_no_expected_value",
    ),
    Mutation(
        "a-sandbox-is-not-tried-out",
        "_try_out",
        "ran.values[place] is not False",
        "ran.values[place] is None",
        f"{SANDBOX}::test_a_sandbox_with_a_hole_is_refused",
    ),
    Mutation(
        "reasons-lost-on-the-way-to-another-process",
        "plain_scores",
        "score.as_json() if isinstance(score, Verdict) else score for score",
        "score for score",
        f"{VERDICTS}::test_verdicts_survive_json",
    ),
    Mutation(
        "resting-prompts-decided-anew-on-resuming",
        "PromptStream.load_state_dict",
        'self._left_out = set(state.get("left_out", ()))',
        "self._left_out = {row for row in self._rested if self._rests(row, self._epoch)}",
        "tests/data/test_prompts.py::test_what_is_known_of_prompts_is_resumed_at_any_point",
    ),
    Mutation(
        "masked-tokens-keep-their-weight",
        "_importance_weights",
        "weights = keep_counted(torch.ones_like(old_logprobs) if weights is None else weights, kept)",
        "weights = torch.ones_like(old_logprobs) if weights is None else weights",
        "tests/training/test_learner.py::test_masked_tokens_have_no_policy_gradient_and_the_others_keep_their_weight",
    ),
    Mutation(
        "band-of-sequences-sums-log-ratios",
        "response_log_ratios",
        "keep_counted(log_ratio, mask).sum(-1) / mask.sum(-1).clamp(min=1)",
        "keep_counted(log_ratio, mask).sum(-1)",
        "tests/algorithm/test_mismatch.py::test_bands_against_a_slow_loop",
    ),
    Mutation(
        "rounding-of-log-probabilities-for-that-of-logits",
        "magnitude_of_rewards",
        "logprobs.abs() + _LOGITS / temperature",
        "logprobs.abs()",
        "tests/rollout/test_collect.py::test_equal_scores_of_a_policy_that_is_the_reference_move_nothing",
    ),
    Mutation(
        "kl-in-the-loss-left-out-of-the-total",
        "Measurements._evaluate",
        "trainer.settings.ppo.kl_coef * found",
        "trainer.settings.reward_kl_coef(trainer.coefficients) * found",
        "tests/stages/ppo/test_distill.py::test_the_best_student_has_the_lowest_kl",
    ),
    Mutation(
        "cut-off-responses-trained-on",
        "SampledBatch.masked",
        "return replace(batch, trained=self.trained.select(rows.tolist())), experience.select(rows)",
        "return self, experience",
        "tests/stages/ppo/test_overlong.py::test_it_trains_as_if_the_cut_responses_had_not_been_sampled",
    ),
    Mutation(
        "biased-pass-at-k",
        "pass_at_k",
        "1 - comb(num_samples - num_right, k) / comb(num_samples, k)",
        "1 - (1 - num_right / num_samples) ** k",
        f"{STATISTICS}::test_pass_at_k_has_the_published_bias_correction",
    ),
    Mutation(
        "ties-count-for-the-majority",
        "majority_at_k",
        "tied + (drawn == right)",
        "tied",
        f"{STATISTICS}::test_a_majority_of_many_responses_by_hand",
    ),
    Mutation(
        "reasons-of-other-rows",
        "ScoredRollout.select",
        "chosen(self.reasons, rows)",
        "self.reasons and self.reasons[: len(rows)]",
        f"{VERDICTS}::test_selected_rows_keep_their_reasons",
    ),
    Mutation(
        "reply-to-an-abandoned-request-taken-for-the-next",
        "WorkerProcess.reply",
        'while reply.get("id") != request.number:',
        "while not reply:",
        "tests/base/workers/test_process.py::test_replies_are_told_apart_by_their_numbers",
    ),
    Mutation(
        "rows-of-other-tasks-judged-for-trl",
        "_called_by_trl",
        "if all(entries[row] is not None for entries in needed)",
        "",
        "tests/tasks/verify/test_trl.py::test_a_verifier_scores_what_a_trainer_passes[gsm8k-text]",
    ),
    Mutation(
        "rows-are-not-checked-before-a-run",
        "RemoteFunction.check",
        "if self._checks_rows and",
        "if False and",
        f"{VERDICTS}::test_a_verifier_runs_by_name_in_a_process_of_its_own",
    ),
    Mutation(
        "score-after-the-last-token",
        "_score_slot",
        'if score_at == "last":',
        'if score_at == "never":',
        f"{SHAPING}::test_the_score_stands_at_the_last_token",
    ),
    Mutation(
        "score-in-the-last-column",
        "_score_slot",
        "last = (steps * mask).amax(-1, keepdim=True)",
        "last = steps.expand_as(mask).amax(-1, keepdim=True)",
        f"{GATE}::test_the_index_contract_from_sampling_to_reward",
    ),
    Mutation(
        "reward-model-read-at-the-first-token",
        "TokenRows.last",
        "torch.tensor(list(accumulate(self.lengths)), device=self.ids.device) - 1",
        "torch.tensor(self.starts, device=self.ids.device)",
        f"{SCALAR}::test_the_score_is_read_at_the_last_real_token_whatever_the_padding[order0-False-llama]",
    ),
    Mutation(
        "stop-token-not-counted",
        "Responses.write",
        "self.lengths[rows] = places + 1",
        "self.lengths[rows] = places",
        f"{GATE}::test_the_index_contract_from_sampling_to_reward",
    ),
    Mutation(
        "the-first-stop-token-alone",
        "Sampler._sample",
        "running = running & ~torch.isin(tokens, self._stops)",
        "running = running & (tokens != self._stops[0])",
        f"{SAMPLER}::test_finished_rows_cost_nothing",
    ),
    Mutation(
        "stopped-by-the-first-stop-token-alone",
        "Responses.rollout",
        "torch.isin(last, stops)",
        "(last == stops[0])",
        f"{SAMPLER}::test_with_several_stop_tokens_a_response_ends_at_the_first_of_them",
    ),
    Mutation(
        "declared-stop-tokens-ignored",
        "own_stop_tokens",
        "ends = (tokenizer.eos_token_id, *_usable(tokenizer, model, declared), end_of_turn(tokenizer))",
        "ends = (tokenizer.eos_token_id, end_of_turn(tokenizer))",
        f"{STOPS}::test_every_id_that_the_model_declares_is_a_stop_token",
    ),
    Mutation(
        "end-of-turn-ignored",
        "own_stop_tokens",
        "ends = (tokenizer.eos_token_id, *_usable(tokenizer, model, declared), end_of_turn(tokenizer))",
        "ends = (tokenizer.eos_token_id, *_usable(tokenizer, model, declared))",
        f"{STOPS}::test_the_end_of_a_templates_turn_is_a_stop_token",
    ),
    Mutation(
        "declared-stop-tokens-lost-on-saving",
        "kept_stop_ids",
        "ends = (tokenizer.eos_token_id, *stop_ids, *_usable(tokenizer, model, _declared(model)))",
        "ends = (tokenizer.eos_token_id, *stop_ids)",
        f"{STOPS}::test_a_saved_model_keeps_what_it_came_with_and_nothing_doubtful",
    ),
    # Data: shares of sources, and room for the answers of a cut prompt.
    Mutation(
        "every-pass-draws-the-same-rows",
        "Mixture.order",
        "start=epoch * count",
        "start=0",
        "tests/data/test_mixing.py::test_a_pass_holds_the_shares_and_later_passes_the_rows_that_were_left_out",
    ),
    Mutation(
        "prompt-cut-without-room-for-its-answers",
        "_prompt_budget",
        "longest - max(lengths)",
        "longest",
        "tests/data/test_readers.py::test_only_the_prompt_is_cut_to_leave_room_for_the_longest_answer",
    ),
    # Tokens and padding: spec §2.
    Mutation(
        "padding-as-text",
        "_split_padding",
        """return re.split(f"(?<={re.escape(pad[:1])})(?={re.escape(pad[1:])})", text)""",
        "return [text]",
        f"{TOKENS}::test_the_text_of_the_padding_token_is_encoded_as_text",
    ),
    Mutation(
        "pad-is-eos",
        "ensure_pad_token",
        "others = (tokenizer.eos_token_id, tokenizer.bos_token_id,",
        "others = (tokenizer.bos_token_id,",
        f"{LANGUAGE}::test_a_tokenizer_without_a_pad_token_of_its_own_gets_a_fresh_one_and_the_embedding_grows",
    ),
    Mutation(
        "forbidden-tokens-allowed",
        "LanguageModel._logits",
        "self._raw_logits(hidden, weight).index_fill_(-1, self.forbidden_ids, FORBIDDEN_LOGIT)",
        "self._raw_logits(hidden, weight)",
        f"{SAMPLER}::test_padding_and_ids_beyond_the_tokenizer_are_never_sampled",
    ),
    Mutation(
        "positions-count-padding",
        "PaddedDecoder._run",
        "(self._mask.long().cumsum(dim=-1) - 1)",
        "torch.arange(self._mask.shape[1]).expand_as(self._mask)",
        f"{DECODING}::test_reading_token_by_token_is_reading_all_at_once[padded-gpt2]",
    ),
    # Supervised stage and reward model: spec §3.
    Mutation(
        "eos-dropped-from-the-loss",
        "EncodedExample.learned",
        "range(max(start, 1), start + len(self.completion))",
        "range(max(start, 1), start + len(self.completion) - 1)",
        f"{SUPERVISED}::test_eos_has_its_share_of_the_loss_and_the_prompt_none",
    ),
    Mutation(
        "prompt-in-the-loss",
        "EncodedExample.learned",
        "range(max(start, 1), start + len(self.completion))",
        "range(1, start + len(self.completion))",
        f"{SUPERVISED}::test_eos_has_its_share_of_the_loss_and_the_prompt_none",
    ),
    Mutation(
        "other-turns-in-the-loss",
        "EncodedExample.learned",
        "if not self.read:",
        "if True:",
        "tests/data/test_chat.py::test_the_loss_covers_what_the_template_marks_as_generated",
    ),
    Mutation(
        "header-of-the-next-turn-learned",
        "render_answer",
        "return _without_eos(tokenizer, whole[len(start) : end])",
        "return _without_eos(tokenizer, whole[len(start) :])",
        "tests/data/test_chat.py::test_the_answers_of_a_comparison_end_where_their_turn_ends",
    ),
    Mutation(
        "pairs-averaged-over-the-batch",
        "ranking_loss",
        "(losses.sum((-1, -2)) / counts.clamp(min=1)).sum() / comparable.sum()",
        "losses.sum() / counts.sum()",
        f"{PREFERENCE}::test_absent_responses_influence_neither_value_nor_gradient[nan]",
    ),
    Mutation(
        "normalization-not-stored",
        "ScalarModel.rescale",
        "setattr(self.classifier.config, NORMALIZATION_KEY, float(self.shift))",
        "pass",
        f"{GATE}::test_a_critic_copied_from_a_normalized_reward_model_is_normalized_too",
    ),
    Mutation(
        "dropout-on-in-the-policy",
        "LanguageModel.__init__",
        "disable_dropout(causal)",
        "causal.eval()",
        f"{LANGUAGE}::test_two_passes_in_training_mode_are_bit_equal_because_dropout_is_off",
    ),
    Mutation(
        "dropout-on-in-the-reward-model",
        "ScalarModel.__init__",
        "disable_dropout(classifier)",
        "classifier.eval()",
        f"{GATE}::test_a_reward_model_in_training_mode_scores_alike_twice[gpt2]",
    ),
    # Rollout: spec §4.
    Mutation(
        "no-temperature-in-the-trainer",
        "ActorCritic.forward",
        "partial(token_logprobs_and_entropy, temperature=temperature, entropy_gradient=entropy_gradient)",
        "partial(token_logprobs_and_entropy, entropy_gradient=entropy_gradient)",
        EACH_TOKEN,
    ),
    Mutation(
        "no-temperature-in-the-reference",
        "reference_logprobs",
        "models.reference, temperature=models.temperature",
        "models.reference, temperature=1.0",
        f"{COLLECT}::test_a_policy_that_is_the_reference_has_no_kl_at_any_temperature",
    ),
    Mutation(
        "no-temperature-in-the-samplers-logprobs",
        "Sampler._draw",
        "token_logprobs(logits, tokens, temperature=self.temperature or 1.0)",
        "token_logprobs(logits, tokens)",
        f"{SAMPLER}::test_sampling_time_logprobs_are_those_of_a_second_pass_at_the_same_temperature[0.7-llama]",
    ),
    Mutation(
        "no-temperature-in-the-draw",
        "Sampler._draw",
        "_inverse_cdf(logits / self.temperature, draws)",
        "_inverse_cdf(logits, draws)",
        f"{SAMPLER}::test_sampled_frequencies_are_the_models_probabilities",
    ),
    Mutation(
        "entropy-at-temperature-one",
        "_LogprobsAndEntropy.forward",
        "entropy = -distribution.exp().mul_(distribution).nansum(-1)",
        "entropy = torch.distributions.Categorical(logits=logits.float()).entropy()",
        EACH_TOKEN,
    ),
    Mutation(
        "stopped-responses-penalised",
        "penalize_missing_eos",
        "return torch.where(stopped, scores, value",
        "return torch.where(~stopped, scores, value",
        f"{SHAPING}::test_a_response_that_never_stopped_scores_worse",
    ),
    Mutation(
        "missing-eos-rewarded",
        "penalize_missing_eos",
        "scores - abs(value)",
        "scores + abs(value)",
        f"{SHAPING}::test_a_response_that_never_stopped_scores_worse",
    ),
    Mutation(
        "missing-eos-above-low-scores",
        "MissingEos._automatic",
        "return min(PUBLISHED, center - pstdev(scores))",
        "return PUBLISHED",
        f"{MISSING}::test_auto_lies_a_standard_deviation_below_the_stopped_scores_and_never_above_minus_one",
    ),
    Mutation(
        "missing-eos-set-anew-after-a-resume",
        "MissingEos.load_state_dict",
        'self.score = state["score"]',
        "pass",
        f"{MISSING}::test_the_first_batch_decides_for_the_whole_run_also_after_a_resume",
    ),
    # What a reward model reads: spec §1, §2.4.
    Mutation(
        "read-at-the-stop-token",
        "Reader._row",
        "sampled = responses.response_ids[index][:-1] if stopped else responses.response_ids[index]",
        "sampled = responses.response_ids[index]",
        f"{READING}::test_a_response_is_scored_at_eos_whatever_token_ended_it",
    ),
    Mutation(
        "own-template-ignored",
        "Reader._row",
        "if not self._as_trained:",
        "if False:",
        f"{READING}::test_a_chat_model_reads_its_own_template_though_it_has_the_policys_tokens",
    ),
    Mutation(
        "text-without-its-wrapping",
        "Reader._row",
        "[*self._start, *encode_text(self._tokenizer, prompt + completion), *self._end]",
        "encode_text(self._tokenizer, prompt + completion)",
        f"{READING}::test_an_encoder_reads_the_text_in_its_tokenizers_own_wrapping",
    ),
    Mutation(
        "judge-takes-part",
        "WeightedReward._models",
        "if judges is not bool(weight)",
        "if True",
        f"{PPO}::test_a_judge_changes_no_figure_but_its_own_and_no_weight",
    ),
    # Rewards: spec §5.
    Mutation(
        "kl-sign-flipped-in-the-rewards",
        "shape_rewards",
        "rewards=scored - penalty",
        "rewards=scored + penalty",
        f"{SHAPING}::test_a_token_made_likelier_than_the_reference_has_it_pays_for_it",
    ),
    Mutation(
        "kl-sign-flipped-in-the-estimators",
        "kl_estimate",
        "log_ratio = ref_logprobs - logprobs",
        "log_ratio = logprobs - ref_logprobs",
        f"{KL}::test_the_kl_loss_averages_over_counted_tokens",
    ),
    Mutation(
        "zieglers-error-unclipped",
        "adapt_kl_coef_ziegler",
        "error = min(max(kl / kl_target - 1.0, -0.2), 0.2)",
        "error = kl / kl_target - 1.0",
        f"{KL}::test_zieglers_controller_reproduces_the_published_factor",
    ),
    Mutation(
        "rewards-shifted-by-whitening",
        "experience_from",
        "masked_whiten(rewards, reward_mask, shift_mean=False, magnitude=magnitude)",
        "masked_whiten(rewards, reward_mask, magnitude=magnitude)",
        f"{COLLECT}::test_whitened_rewards_keep_their_mean_and_their_padding",
    ),
    Mutation(
        "controllers-adapt-to-a-frozen-policy",
        "observers_of",
        "and trainer.trains_policy and not event.result.refused:",
        "and not event.result.refused:",
        f"{WARMUP}::test_the_coefficients_first_adapt_after_an_update_of_the_policy",
    ),
    Mutation(
        "schedule-counts-the-critics-warm-up",
        "PpoSettings.learning_rates",
        "update - 1 - (warmup_updates if train_policy else 0),",
        "update - 1,",
        f"{WARMUP}::test_the_schedule_covers_the_updates_of_the_policy",
    ),
    # Groups: spec §4.37.
    Mutation(
        "spread-of-a-group-by-an-epsilon",
        "group_scores",
        "high - low > rounding)",
        "variance > 1e-6)",
        f"{GROUPS}::test_equal_scores_have_no_spread_although_their_deviation_is_rounded",
    ),
    Mutation(
        "totals-of-token-scores-in-float32",
        "total_scores",
        "(scores.double() + token_scores.double().sum(-1)).to(scores.dtype)",
        "scores + token_scores.sum(-1)",
        f"{GROUPS}::test_the_same_token_scores_at_other_tokens_have_no_spread",
    ),
    Mutation(
        "a-single-response-compared-with-itself",
        "_by_group",
        "int(counted[rows].any(-1).sum()) > 1",
        "len(known) > 0",
        "tests/algorithm/test_group_advantages.py::test_a_response_without_others_is_not_compared_with_itself",
    ),
    Mutation(
        "slot-of-the-score-counted-in-the-length",
        "experience_from",
        '"actions": rollout.action_mask',
        '"actions": reward_mask',
        f"{COLLECT}::test_the_slot_of_the_score_does_not_make_a_response_longer",
    ),
    Mutation(
        "a-stop-of-the-policy-ends-the-critics-pass",
        "Steps.take_epoch",
        "            if result.stopped_early:\n                self._take_critic_step(rows)",
        "            if result.stopped_early:\n                break",
        "tests/training/test_critic_steps.py::test_a_stop_of_the_policy_is_none_of_a_separate_critic",
    ),
    Mutation(
        "rounds-without-a-score-not-counted",
        "Sampling.sampled",
        "num_sampled += sampled[0].num_responses",
        "num_sampled = scored.rollout.num_responses",
        f"{SAMPLING}::test_a_round_without_any_score_counts_among_the_sampled_and_the_unscored",
    ),
    Mutation(
        "epochs-of-small-updates-counted-in-minibatches-of-full-ones",
        "PpoLog._flops",
        "min(trainer.settings.ppo.num_minibatches, rollout.num_responses)",
        "trainer.settings.ppo.num_minibatches",
        f"{SAMPLING}::test_an_update_is_smaller_where_the_rounds_do_not_fill_it",
    ),
    Mutation(
        "resampled-groups-merged-with-the-first",
        "Sampling.sampled",
        "scored.renumbered(len(prompts))",
        "scored.renumbered(0)",
        f"{SAMPLING}::test_resampling_fills_the_update_with_groups_that_have_spread",
    ),
    Mutation(
        "greedy-baseline-is-drawn",
        "Sampler._draw",
        "else logits.argmax(dim=-1)",
        "else _inverse_cdf(logits, draws)",
        f"{SAMPLING}::test_remax_compares_each_response_with_the_greedy_one_to_its_prompt",
    ),
    Mutation(
        "positive-examples-without-token-scores",
        "experience_from",
        "positive=experience.total_scores >= use.positive_min_score",
        "positive=experience.scores >= use.positive_min_score",
        f"{COLLECT}::test_positive_examples_score_enough_token_scores_included",
    ),
    # Advantages: spec §6.25 and §6.26.
    Mutation(
        "padding-bootstrapped",
        "_next_values",
        "following = torch.where(mask[..., 1:], places, length)",
        "following = torch.where(mask[..., 1:] | True, places, length)",
        f"{ADVANTAGES}::test_with_an_outcome_reward_the_last_advantage_is_reward_minus_value",
    ),
    Mutation(
        "lambda-forgotten",
        "generalized_advantages",
        "else gamma * gae_lambda",
        "else gamma",
        f"{ADVANTAGES}::test_a_hand_computed_episode",
    ),
    Mutation(
        "one-norm-for-both-models",
        "clip_by_owner",
        "trained = [each for each in parameters_of(optimizer, critic=critic) if each.grad is not None]",
        "trained = [each for group in optimizer.param_groups for each in group['params'] if each.grad is not None]",
        "tests/training/test_critic_steps.py::test_a_separate_critics_gradient_does_not_shrink_the_policys_step",
    ),
    Mutation(
        "warm-up-by-result-counted-as-the-most",
        "ValueWarmup.num_updates",
        "return self._most if self._length is None else self._length",
        "return self._most",
        "tests/stages/ppo/test_critic_training.py::test_a_warm_up_that_ends_by_its_result_is_one_of_that_length",
    ),
    Mutation(
        "end-of-the-warm-up-forgotten",
        "Trainer.register",
        "is not None and self.warmup.ends_by_result:",
        "is not None and False:",
        "tests/stages/test_resume.py::test_ppo_goes_on_to_the_bit[ppo.value_warmup_updates.until=0.01]",
    ),
    Mutation(
        "extra-passes-train-the-trunk",
        "ActorCritic.critic_outputs",
        "with torch.no_grad():\n                    shared",
        "with torch.enable_grad():\n                    shared",
        "tests/training/test_critic_steps.py::test_a_shared_trunk_is_read_without_a_graph",
    ),
    Mutation(
        "length-with-padding",
        "LengthAdaptiveLambda.__call__",
        "lengths = mask.sum(-1).clamp(min=1).to(dtype)",
        "lengths = torch.full_like(mask[..., 0], mask.shape[-1], dtype=dtype)",
        f"{ADVANTAGES}::test_a_lambda_per_response_follows_its_length",
    ),
    Mutation(
        "critics-lambda-forgotten",
        "advantage_of",
        "GeneralizedAdvantage(use.gamma, gae_lambda, use.value_gae_lambda)",
        "GeneralizedAdvantage(use.gamma, gae_lambda)",
        f"{SETTINGS}::test_the_lambdas_of_advantages_and_targets",
    ),
    Mutation(
        "value-unit-without-the-error",
        "_returns_unit",
        "max(spread_of_returns(returns), MIN_SHARE_OF_ERROR * error)",
        "spread_of_returns(returns)",
        f"{SETTINGS}::test_returns_that_hardly_differ_do_not_multiply_the_value_loss",
    ),
    Mutation(
        "returns-from-whitened-advantages",
        "experience_from",
        "advantages = masked_whiten(advantages, rollout.action_mask, magnitude=magnitude)",
        "advantages = masked_whiten(advantages, rollout.action_mask); returns = advantages + values",
        f"{UPDATE}::test_returns_keep_the_rewards_scale_while_advantages_are_whitened",
    ),
    Mutation(
        "whitening-before-masking",
        "masked_whiten",
        "mean = keep_counted(x, mask).sum() / count",
        "mean = x.mean()",
        f"{MASKING}::test_whitening_before_masking_would_give_something_else",
    ),
    Mutation(
        "variance-over-padding",
        "masked_whiten",
        "centered.square().sum() / (count - correction)",
        "centered.square().sum() / (mask.numel() - correction)",
        f"{MASKING}::test_whitening_before_masking_would_give_something_else",
    ),
    # Losses: spec §6.27–6.32.
    Mutation(
        "ratio-from-probabilities",
        "Tokens.of",
        "rho=log_rho.exp()",
        "rho=logprobs.exp() / (old_logprobs.exp() + 1e-8)",
        f"{POLICY}::test_absurd_ratios_stay_finite[1.0-100.0-clipped]",
    ),
    Mutation(
        "optimistic-policy-clip",
        "clipped_policy_loss",
        "torch.maximum(unclipped, clipped)",
        "torch.minimum(unclipped, clipped)",
        f"{QUADRANTS}[1-1.5-False]",
    ),
    Mutation(
        "critic-that-nothing-needs",
        "PpoConfig.resolved_critic",
        ' if may_need_critic(self.estimator) else "none"',
        "",
        "tests/stages/ppo/test_critic_free.py::test_nothing_of_a_critic_is_logged_or_saved",
    ),
    Mutation(
        "readout-that-forgets-nothing",
        "Readout.fit",
        "kept.mul_(self._decay)",
        "kept",
        f"{STATES}::test_the_head_is_the_ridge_regression_of_recent_states_by_hand[False-token-None]",
    ),
    Mutation(
        "readout-of-every-epoch",
        "Readout.read",
        "chosen = is_new & (",
        "chosen = (",
        f"{STATES}::test_passes_of_its_own_read_the_same_states",
    ),
    Mutation(
        "readout-penalty-without-held-out-prompts",
        "second_half",
        "rollout.group % 2 == 1",
        "torch.zeros_like(rollout.group, dtype=torch.bool)",
        f"{STATES}::test_responses_to_a_prompt_are_in_one_half_unless_it_is_the_only_one",
    ),
    Mutation(
        "thaw-by-the-mean-of-shares",
        "FrozenCritic.observe",
        "[(1 - metrics[EXPLAINED]) * variance, variance]",
        "[1 - metrics[EXPLAINED], 1.0]",
        f"{CHEAP}::test_a_critic_is_thawed_by_five_updates_together",
    ),
    Mutation(
        "frozen-critic-in-every-pass",
        "LanguageLearner._forward",
        "values or self.needs_values",
        "True",
        f"{CHEAP}::test_a_frozen_critic_stays_to_the_bit_and_has_no_optimizer_state",
    ),
    Mutation(
        "sequence-ratio-without-length",
        "_of_sequences",
        "response_log_ratios(frozen, mask).unsqueeze(-1)",
        "frozen.sum(-1, keepdim=True)",
        f"{POLICY}::test_gspo_agrees_with_a_loop_over_the_sequences",
    ),
    Mutation(
        "turn-ratio-without-length",
        "Turns.averaged",
        "self.summed(x) / counts",
        "self.summed(x)",
        f"{TURNS}::test_the_clipped_loss_agrees_with_a_loop_over_the_turns",
    ),
    Mutation(
        "turn-credit-with-a-critic-at-every-token",
        "experience_from",
        "        reward_mask = turns.starts\n",
        "",
        f"{CREDIT}::test_the_critic_learns_at_first_tokens_and_the_policy_at_all",
    ),
    Mutation(
        "turn-credit-without-the-kl-of-later-tokens",
        "experience_from",
        "rewards = turns.summed(rewards)",
        "rewards = keep_counted(rewards, turns.starts)",
        f"{CREDIT}::test_advantages_returns_and_what_the_critic_is_trained_at_are_those_of_a_slow_loop",
    ),
    Mutation(
        "turn-credit-without-the-value-of-the-cut",
        "experience_from",
        "of_steps(_value_at_cut(rollout, models, reward_mask, gamma=use.gamma))",
        "_value_at_cut(rollout, models, reward_mask, gamma=use.gamma)",
        f"{CREDIT}::test_advantages_returns_and_what_the_critic_is_trained_at_are_those_of_a_slow_loop",
    ),
    Mutation(
        "score-slot-as-part-of-the-last-turn",
        "Turns.of",
        " | (mask & ~actions)",
        "",
        f"{CREDIT}::test_advantages_returns_and_what_the_critic_is_trained_at_are_those_of_a_slow_loop",
    ),
    Mutation(
        "first-turn-only-where-it-is-marked",
        "Turns.of",
        "(actions & (actions.cumsum(-1) == 1)) | ",
        "",
        f"{CREDIT}::test_one_turn_has_the_total_less_the_value_of_the_prompt_whatever_gamma_and_lambda",
    ),
    Mutation(
        "turn-sums-in-the-order-of-their-terms",
        "Turns.summed",
        "keep_counted(x, self.mask).double()",
        "keep_counted(x, self.mask)",
        f"{TURNS}::test_sums_do_not_depend_on_the_place_of_their_terms",
    ),
    Mutation(
        "adaptive-lambda-of-turns-by-tokens",
        "GeneralizedAdvantage.__call__",
        "mask & tokens_of(mask, inputs)",
        "tokens_of(mask, inputs)",
        f"{CREDIT}::test_a_turn_counts_as_one_token_that_is_paid_and_valued_as_the_turn",
    ),
    Mutation(
        "process-rewards-by-token-in-turns",
        "experience_from",
        "steps = rollout.action_mask & reward_mask",
        "steps = rollout.action_mask",
        f"{CREDIT}::test_a_turn_counts_as_one_token_that_is_paid_and_valued_as_the_turn",
    ),
    Mutation(
        "critic-check-by-turn",
        "Trainer.evaluate",
        ', "credit": "token"',
        "",
        "tests/stages/ppo/test_critic_check.py::test_returns_to_go_equal_those_of_a_slow_loop",
    ),
    Mutation(
        "readout-of-slots-without-a-return",
        "Readout.read",
        "states[mask[mask | self._experience.action_mask[rows]]]",
        "states[: int(mask.sum())]",
        "tests/training/test_readout.py::test_the_head_is_the_ridge_regression_of_recent_states_by_hand",
    ),
    Mutation(
        "gigpo-state-with-the-history",
        "turn_states",
        "while at >= 0 and not is_own[at]:",
        "while at >= 0:",
        f"{TURNS}::test_a_state_is_what_was_read_since_the_last_turn",
    ),
    Mutation(
        "gigpo-states-across-groups",
        "turn_states",
        "key = (group, *context",
        "key = (0, *context",
        f"{TURNS}::test_groups_and_prompts_keep_states_apart",
    ),
    Mutation(
        "gigpo-new-context-by-its-end",
        "turn_states",
        "prompt[: len(prompt) + 1 + at] if at < 0 else []",
        "[]",
        f"{TURNS}::test_a_state_is_what_was_read_since_the_last_turn",
    ),
    Mutation(
        "gigpo-discounted-episodes",
        "GroupInGroupAdvantage.__call__",
        "GroupMeanAdvantage(scale_by_std=True)",
        "GroupMeanAdvantage(self.gamma, scale_by_std=True)",
        f"{TURNS}::test_gigpo_agrees_with_a_loop",
    ),
    Mutation(
        "gigpo-score-slot-as-a-turn",
        "GroupInGroupAdvantage.__call__",
        "steps = mask & tokens_of(mask, inputs)",
        "steps = mask.clone()",
        f"{TURNS}::test_the_slot_of_the_score_is_no_turn",
    ),
    Mutation(
        "gigpo-rewards-as-process-rewards",
        "_estimation_of",
        ' and ppo.estimator != "gigpo"',
        "",
        "tests/stages/ppo/test_credit.py::test_the_environments_rewards_are_those_of_gigpos_turns",
    ),
    Mutation(
        "cispo-gradient-through-the-weight",
        "cispo_policy_loss",
        "rho = tokens.rho.detach()",
        "rho = tokens.rho",
        f"{POLICY}::test_cispo_caps_the_weight_and_keeps_every_gradient",
    ),
    Mutation(
        "group-without-spread-by-epsilon",
        "_standardized",
        "values[mask].std(correction=1)",
        "(values[mask].float().std(correction=1) + 1e-9)",
        f"{GROUP_ADVANTAGES}::test_scores_that_hardly_differ_are_scaled_without_overflow",
    ),
    Mutation(
        "leave-one-out-with-itself",
        "_less_others",
        "(means.sum() - means) / (mask.any(-1).sum() - 1)",
        "means.sum() / mask.any(-1).sum()",
        f"{GROUP_ADVANTAGES}::test_leave_one_out_is_the_group_mean_times_g_over_g_minus_one",
    ),
    Mutation(
        "clipped-without-regard-to-the-advantage",
        "clipped_policy_loss",
        "torch.maximum(unclipped, clipped)",
        "clipped",
        f"{QUADRANTS}[1-0.5-True]",
    ),
    Mutation(
        "bad-tokens-unclipped",
        "clipped_policy_loss",
        "rho.clamp(low, high)",
        "rho.clamp(max=high)",
        f"{QUADRANTS}[-1-0.5-False]",
    ),
    Mutation(
        "histogram-returns-not-moved-into-the-support",
        "Bins.target",
        "returns.clamp(self.low, self.high)",
        "returns",
        f"{HISTOGRAM}::test_the_loss_and_its_gradient_agree_with_a_loop",
    ),
    Mutation(
        "histogram-centers-at-the-lower-edges",
        "Bins.centers",
        "return (edges[:-1] + edges[1:]) / 2",
        "return edges[:-1]",
        f"{HISTOGRAM}::test_a_uniform_histogram_has_the_center_of_the_support_as_its_value",
    ),
    Mutation(
        "histogram-forgets-the-reward-models-shift",
        "ScalarModel.predict_histogram",
        "start_from(head, shift=shift)",
        "start_from(head)",
        "tests/models/test_heads.py"
        "::test_both_kinds_of_critic_predict_a_histogram_of_which_the_values_are_the_means[separate]",
    ),
    Mutation(
        "optimistic-value-clip",
        "clipped_value_loss",
        "losses = torch.maximum(",
        "losses = torch.minimum(",
        f"{CRITIC}::test_by_hand",
    ),
    Mutation(
        "value-loss-without-its-half",
        "clipped_value_loss",
        "loss = 0.5 * aggregate(",
        "loss = aggregate(",
        f"{CRITIC}::test_by_hand",
    ),
    Mutation(
        "entropy-punished",
        "Objective.__call__",
        "losses.append(-self.entropy_coef * aggregate(",
        "losses.append(self.entropy_coef * aggregate(",
        f"{OBJECTIVE}::test_the_total_is_the_weighted_sum_of_its_terms",
    ),
    Mutation(
        "mean-over-padding",
        "masked_mean",
        "return keep_counted(x, mask).sum() / mask.sum()",
        "return keep_counted(x, mask).mean()",
        f"{MASKING}::test_the_mean_is_that_of_the_counted_entries",
    ),
    Mutation(
        "loss-averaged-over-padding",
        "aggregation_normalizer",
        'return mask.sum() if aggregation == "token"',
        'return torch.tensor(mask.numel()) if aggregation == "token"',
        f"{AGGREGATION}[settings0-2.2]",
    ),
    Mutation(
        "micro-batches-weighted-alike",
        "Steps._policy_terms",
        "return self.objective(outputs, part, divisors)",
        "return self.objective(outputs, part, self.objective.divisors(part))",
        f"{UPDATE}::test_the_gradient_does_not_depend_on_the_split_into_micro_batches[token-shared]",
    ),
    Mutation(
        "no-shuffle",
        "minibatches_of",
        "torch.randperm(num_rows, generator=generator)",
        "torch.arange(num_rows)",
        f"{UPDATE}::test_every_epoch_is_a_fresh_shuffle_that_visits_each_response_once",
    ),
    # Optimizer: spec §7.35.
    Mutation(
        "tf1-eps-ignored",
        "_convert_tf1_eps",
        'group["tf1_eps"] / math.sqrt(1.0 - group["betas"][1] ** group["tf1_step"])',
        'group["tf1_eps"]',
        f"{OPTIMIZER}::test_three_steps_follow_the_hand_computed_trace[tf1-expected1]",
    ),
    Mutation(
        "weights-decay-silently",
        "build_optimizer",
        "_groups(parameters, weight_decay,",
        "_groups(parameters, weight_decay or 0.01,",
        f"{GATE}::test_a_matrix_without_a_gradient_stays_as_it_is",
    ),
    Mutation(
        "moments-lose-their-number-format",
        "restore_optimizer",
        "_undo_casts(optimizer, restored)",
        "pass",
        "tests/training/checkpoint/test_state.py::test_two_parts_are_the_whole_with_every_optimizer[4-4-adafactor-dtype1]",
    ),
    Mutation(
        "scales-missing-in-the-gradient",
        "QuantizedLinear.times_transposed",
        'scaled = outputs * self.scales.to(outputs.dtype) if self.dtype == "int8" else outputs',
        "scaled = outputs",
        "tests/models/test_quantized.py::test_products_and_gradients_are_those_of_the_whole_matrix[linear-True-int8]",
    ),
    # Rows without padding, and the fast paths: each must be what the plain one is. A trunk that packs or decodes
    # wrongly is found out when it is made, and run in a slower way: such mistakes show in the way that is chosen.
    Mutation(
        "positions-not-reset-between-rows",
        "TokenRows.positions",
        "(torch.arange(len(starts)) - starts).to(self.ids.device)",
        "torch.arange(len(starts)).to(self.ids.device)",
        f"{PACKABLE}[gpt2]",
    ),
    Mutation(
        "packed-rows-see-the-future",
        "_attend_group",
        "*own, device=device, scaling=scaling, is_causal=True)",
        "*own, device=device, scaling=scaling, is_causal=False)",
        f"{PACKABLE}[llama]",
    ),
    Mutation(
        "responses-see-the-next-token",
        "_group",
        ".tril(before)",
        ".tril(before + 1)",
        f"{SHARING}::test_states_and_gradients_are_those_of_each_row_by_itself[cpu-lengths0-llama]",
    ),
    Mutation(
        "gradients-added-in-any-order",
        "packed_states",
        "layout).index_select(0, places)",
        "layout)[places]",
        f"{SHARING}::test_the_gradients_are_the_same_to_the_bit_each_time",
    ),
    Mutation(
        "control-weight-fitted-on-its-own-prompts",
        "control_weights",
        "sums[2 - half * 2 : 4 - half * 2]",
        "sums[half * 2 : half * 2 + 2]",
        f"{CONTROL}::test_the_weight_of_a_prompt_does_not_depend_on_its_own_responses",
    ),
    Mutation(
        "control-weight-untested",
        "_tested_weight",
        "if saved > 0 else 0.0",
        "if saved > -1e9 else 0.0",
        f"{CONTROL}::test_a_critic_of_noise_costs_next_to_nothing",
    ),
    Mutation(
        "control-variate-of-the-value-alone",
        "ControlVariateAdvantage._parts",
        "total_reward(to_go, mask) - estimated - first, targets",
        "values - first, targets",
        f"{CONTROL}::test_advantages_and_weights_are_those_of_a_slow_loop",
    ),
    Mutation(
        "prompts-of-the-same-length-shared",
        "prefix_tree",
        "(first[group[0]], len(group[0]) - read)",
        "(len(group[0]), len(group[0]) - read)",
        f"{SHARING}::test_pieces_have_the_same_numbers_where_texts_are_the_same",
    ),
    Mutation(
        "padding-shared-as-a-prompt",
        "Rollout.prompts",
        "self.prompt_ids[self.prompt_mask].tolist()",
        "self.prompt_ids.flatten().tolist()",
        f"{SHARING}::test_rows_with_the_same_tokens_share_a_prompt_whatever_their_groups",
    ),
    Mutation(
        "shared-prompts-counted-again",
        "budget_batches",
        "if number in held",
        "if False",
        f"{ROWS}::test_batches_count_the_tokens_of_a_prompt_once",
    ),
    Mutation(
        "rectangle-shifted",
        "_attend_group",
        "places.index_copy(0, group.slots, states)",
        "places.index_copy(0, group.slots, states.roll(1, 0))",
        f"{PACKABLE}[gpt2]",
    ),
    Mutation(
        "states-left-sorted",
        "Trunk.hidden",
        "return Gather.apply(self._hidden_sorted(rows.take(order)), rows.token_indices(order).argsort())",
        "return self._hidden_sorted(rows.take(order))",
        f"{ALONE}[as it can-gpt2]",
    ),
    Mutation(
        "window-forgotten",
        "Trunk.packs",
        "self._packs and (self._reach is None or longest <= self._reach)",
        "self._packs",
        f"{ALONE}[as it can-mistral]",
    ),
    Mutation(
        "capped-scores-packed",
        "_by_layout",
        "for name in UNSUPPORTED",
        "for name in UNSUPPORTED[1:]",
        f"{TRUNK}::test_scores_that_are_hardly_capped_are_capped_all_the_same",
    ),
    Mutation(
        "recomputed-with-another-attention",
        "recompute_attention",
        "layout_attention(config) if by_layout else nullcontext()",
        "nullcontext()",
        f"{TRUNK}::test_activations_that_are_computed_again_give_the_same_gradient[llama]",
    ),
    Mutation(
        "prompts-columns-unmasked",
        "KeyValues.__init__",
        "masked_fill(hidden, -torch.inf)",
        "masked_fill(hidden, 0.0)",
        f"{PACKABLE}[llama]",
    ),
    Mutation(
        "recurrent-state-forgotten",
        "PaddedDecoder._run",
        "Any] = {self._cache_name: self._cache}",
        "Any] = {self._cache_name: None}",
        f"{TOKEN_BY_TOKEN}[as it can-mamba]",
    ),
    Mutation(
        "dropped-rows-of-a-cache-kept",
        "PaddedDecoder.keep",
        "self._cache.reorder_cache(rows)",
        "pass",
        f"{DROPPING}[as it can-mamba]",
    ),
    Mutation(
        "rows-mixed-at-a-rotary-switch",
        "Trunk._hidden_sorted",
        "rows.split([num_beyond, len(rows.lengths) - num_beyond])",
        "[rows]",
        f"{UNUSUAL}::test_rows_on_both_sides_of_a_rotary_switch_do_not_change_each_other",
    ),
    Mutation(
        "jitter-while-recomputing",
        "Trunk._layers_in_training",
        "layer.training = True",
        "layer.train()",
        f"{UNUSUAL}::test_routers_have_no_jitter_under_activation_checkpointing[mixtral]",
    ),
    Mutation(
        "texts-padded-with-zero",
        "classify",
        "part.pad(classifier.config.get_text_config().pad_token_id or 0,",
        "part.pad(0,",
        f"{UNUSUAL}::test_padding_is_the_tokenizers",
    ),
    Mutation(
        "probe-that-finds-nothing",
        "relative_error",
        "return float((error / scale",
        "return 0.0 * float((error / scale",
        f"{UNUSUAL}::test_a_model_that_cannot_be_right_is_refused_in_one_line[encoder]",
    ),
    Mutation(
        "mask-of-dropped-rows-kept",
        "KeyValues.keep",
        "self._mask = self._mask.index_select(0, rows)",
        "self._mask = self._mask[: len(rows)]",
        f"{DROPPING}[as it can-llama]",
    ),
    Mutation(
        "wrong-rows-positions-dropped",
        "PackedDecoder.keep",
        "self._positions = self._positions[rows]",
        "self._positions = self._positions[: len(rows)]",
        f"{DROPPING}[as it can-gpt2]",
    ),
    Mutation(
        "draws-forgotten-when-rows-are-dropped",
        "Sampler._sample",
        "self._draw(decoder.hidden, table.draws[rows, place",
        "self._draw(decoder.hidden, table.draws[: len(rows), place",
        f"{ANY_COMPANY}[llama]",
    ),
    Mutation(
        "values-of-stopped-rows",
        "Sampler._sample",
        "rows[alive], place, tokens[alive], logprobs[alive], decoder.hidden[alive])",
        "rows, place, tokens, logprobs, decoder.hidden)",
        f"{NOTED}[llama-False]",
    ),
    Mutation(
        "waiting-rows-read",
        "PackedDecoder.step",
        "return self._read(tokens[running], running.long())",
        "return self._read(tokens, torch.ones_like(tokens))",
        f"{DIALOGUES}::test_conversations_are_those_of_a_loop_that_reads_everything_again[llama-as it can]",
    ),
    Mutation(
        "turns-answered-one-by-one",
        "Sampler._talk",
        "< share * len(rows)",
        "< 1",
        f"{DIALOGUES}::test_rows_that_wait_are_not_computed_and_half_of_them_are_answered_together",
    ),
    Mutation(
        "last-token-of-a-turn-not-read",
        "Sampler._talk",
        "[token, *(answers.get(row) or ())] for",
        "[*(answers.get(row) or (token,))] for",
        f"{DIALOGUES}::test_conversations_are_those_of_a_loop_that_reads_everything_again[llama-as it can]",
    ),
    Mutation(
        "what-was-read-is-trained-on",
        "Responses.append",
        "if logprobs is not None:\n            self.logprobs[row, added]",
        "self.own[row, added] = True\n        if logprobs is not None:\n            self.logprobs[row, added]",
        f"{DIALOGUES}::test_conversations_are_those_of_a_loop_that_reads_everything_again[llama-as it can]",
    ),
    Mutation(
        "token-after-a-prompt-seen",
        "_group_of_several",
        "masked_fill_(~is_there.to(device)[:, None], -torch.inf)",
        "masked_fill_(~is_there.to(device)[:, None], 0.0)",
        f"{SHARING}::test_states_and_gradients_are_those_of_each_row_by_itself[gpu-lengths0-llama]",
    ),
    Mutation(
        "query-heads-with-anothers-keys",
        "attend",
        "query.unflatten(1, (-1, shared)).unbind(2)",
        "query.unflatten(1, (shared, -1)).unbind(1)",
        f"{SHARING}::test_on_a_gpu_too_each_query_head_attends_with_its_own_key_head",
    ),
    Mutation(
        "later-tokens-of-a-block-seen",
        "_Block.of",
        "last = ends[:, None, None] + places[:, None]",
        "last = ends[:, None, None] + places.amax()",
        f"{DECODING}::test_rows_get_longer_each_by_itself[False-llama]",
    ),
    Mutation(
        "columns-of-dropped-rows-kept",
        "KeyValues.keep",
        "self._spans = self._spans[0][rows], self._spans[1][rows]",
        "self._spans = self._spans[0][: len(rows)], self._spans[1][: len(rows)]",
        f"{DECODING}::test_rows_get_longer_each_by_itself[False-llama]",
    ),
    Mutation(
        "turn-closed-twice",
        "TemplateTurns.after",
        "return ids[closing + 1 :]",
        "return ids",
        "tests/data/test_turns.py::test_a_conversation_is_what_the_template_writes[chatml-True]",
    ),
    Mutation(
        "turn-paid-where-the-answer-ends",
        "Episodes._after",
        "self._pay(row, turn.reward)",
        "state.length += 1; self._pay(row, turn.reward); state.length -= 1",
        f"{PLAYER}::test_rewards_are_paid_at_the_last_token_of_each_turn",
    ),
    Mutation(
        "cut-off-episode-ends-at-zero",
        "experience_from",
        "credited = rewards + of_steps(_value_at_cut(",
        "credited = rewards + 0 * of_steps(_value_at_cut(",
        f"{PLAYER}::test_a_cut_off_episode_goes_on_in_the_critics_eyes[shared-last]",
    ),
    Mutation(
        "value-at-the-cut-not-discounted",
        "_value_at_cut",
        "torch.where(counts, value, gamma * value)",
        "torch.where(counts, value, value)",
        f"{PLAYER}::test_a_cut_off_episode_goes_on_in_the_critics_eyes[shared-last]",
    ),
    Mutation(
        "episodes-of-a-group-start-apart",
        "Trainer.sample",
        "[starts[group] for group in groups]",
        "[seed for seed in seeds]",
        "tests/stages/ppo/test_episodes.py::test_the_episodes_of_a_group_start_alike",
    ),
    Mutation(
        "micro-batches-left-sorted",
        "evaluate_in_passes",
        "whole[part.rows] = table",
        "whole[: len(table)] = table",
        f"{COLLECT}::test_the_results_of_micro_batches_are_in_the_rollouts_order",
    ),
    Mutation(
        "budget-overrun",
        "budget_batches",
        "if batch and room is not None and added > room:",
        "if batch and room is not None and room <= 0:",
        f"{ROWS}::test_batches_hold_each_row_once_and_no_more_than_the_budget",
    ),
    Mutation(
        "chunks-in-the-wrong-order",
        "LanguageModel.over_logits",
        "return tuple(torch.cat(measures)",
        "return tuple(torch.cat(measures[::-1])",
        f"{CHUNKS}::test_chunks_give_what_the_whole_gives[1-False]",
    ),
    Mutation(
        "entropy-gradient-with-the-wrong-sign",
        "_LogprobsAndEntropy.backward",
        "factor = factor - surprise.mul_(",
        "factor = factor + surprise.mul_(",
        BOTH_AT_ONCE,
    ),
    Mutation(
        "token-decoded-alone",
        "token_pieces",
        "end - _CONTEXT",
        "end",
        f"{PIECES}::test_long_texts_take_linear_work_and_lose_no_place",
    ),
    Mutation(
        "window-begins-within-a-character",
        "token_pieces",
        "whole.append(end)",
        "pass",
        f"{PIECES}::test_long_texts_take_linear_work_and_lose_no_place",
    ),
    *RELIABILITY,
    # Sampling on vLLM servers.
    Mutation(
        "tied-weights-sent-once",
        "PolicyWeights.__iter__",
        "in self._causal.state_dict().items():",
        "in self._causal.named_parameters():",
        f"{ENGINE}::test_a_run_samples_on_the_server_and_sends_it_every_version_of_the_weights",
    ),
    Mutation(
        "prefixes-cached-by-former-weights",
        "VllmEngine.generate",
        "salt=version",
        "salt=self._run",
        f"{ENGINE}::test_a_run_samples_on_the_server_and_sends_it_every_version_of_the_weights",
    ),
    Mutation(
        "weights-not-sent-after-a-rollback",
        "Trainer.publish",
        "is_new = state != self._published",
        "is_new = self._published is None",
        f"{ENGINE}::test_weights_that_were_rolled_back_are_sent_before_the_next_rollout",
    ),
    Mutation(
        "server-started-again-without-weights",
        "Fleet._recover",
        "gone = self._send(member)",
        "gone = None",
        "tests/rollout/vllm/test_fleet.py::test_a_server_that_is_killed_is_started_again_with_the_current_weights",
    ),
    # TRPO.
    Mutation(
        "natural-step-of-half-the-kl",
        "natural_step",
        "math.sqrt(2.0 * region.max_kl / curvature)",
        "math.sqrt(region.max_kl / curvature)",
        f"{GRADIENT}::test_the_natural_step_solves_the_damped_system_and_spends_the_kl",
    ),
    Mutation(
        "conjugate-gradient-without-the-conjugate",
        "conjugate_gradient",
        "direction = residual + squared / before * direction",
        "direction = residual.clone()",
        f"{GRADIENT}::test_k_iterations_are_the_best_solution_in_the_krylov_space",
    ),
    Mutation(
        "line-search-on-the-surrogate-alone",
        "line_search",
        "improvement > 0.0 and kl <= region.max_kl",
        "improvement > 0.0 and kl <= 1.0",
        f"{TRPO}::test_every_accepted_update_stays_within_the_kl_and_improves_the_surrogate",
    ),
    Mutation(
        "weights-of-the-last-try-kept",
        "_searched",
        "_assign(parameters, old)",
        "pass",
        f"{TRPO}::test_a_search_that_finds_nothing_leaves_the_weights_to_the_bit",
    ),
    Mutation(
        "policy-steps-down-the-surrogate",
        "_policy_step",
        "-gradient,",
        "gradient,",
        f"{TRPO}::test_the_step_is_that_of_an_explicit_fisher_matrix",
    ),
    # Tests of critics on continuations of prefixes.
    Mutation(
        "pairs-of-one-prompt-count-as-pairs-across-prompts",
        "PromptResamples._shares",
        "(each - each.diagonal().diag() for each in (right, differ))",
        "(each for each in (right, differ))",
        f"{PREFIXES}::test_figures_equal_those_of_slow_loops",
    ),
    Mutation(
        "equal-values-count-as-ordered",
        "ordered_pairs",
        "right = (1 + order * torch.sign(guesses[:, None] - guesses[None, :])) / 2",
        "right = (order * torch.sign(guesses[:, None] - guesses[None, :]) >= 0).double()",
        f"{PREFIXES}::test_equal_guesses_are_half_right_whatever_the_truth",
    ),
    Mutation(
        "return-of-the-whole-response-in-place-of-the-return-to-go",
        "sample_prefixes",
        "each.gather(1, starts[:, None])",
        "each[:, :1]",
        "tests/stages/ppo/test_critic_check.py::test_returns_to_go_equal_those_of_a_slow_loop",
    ),
    Mutation(
        "continuations-longer-than-the-limit-of-the-response",
        "sample_continuations",
        "limit = max_new_tokens - cuts[places[0]]",
        "limit = max_new_tokens",
        f"{CONTINUATIONS}::test_no_row_reads_more_tokens_than_there_is_room_for",
    ),
)
