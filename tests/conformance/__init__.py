"""What every source of envs must keep, C1 to C44, and the tests that show it.

The tests of this folder collect from each of `sources.SOURCES`: single envs, our vectoriser, `SyncVectorEnv` and
`AsyncVectorEnv` in three modes with and without copies and shared memory, `CartPoleVectorEnv`, ALE, envpool, torch envs
that reuse their tensors, dense final observations, games of several agents and dm_control. What needs one source only
is shown where that source is tested.
"""

STREAMS = "tests/conformance/test_streams.py"
WORKERS = "tests/conformance/test_workers.py"
DIRECT, VECTOR = "tests/envs/test_direct.py", "tests/envs/test_vector.py"
VECTOR_FAILURES, QUIRKS = "tests/envs/test_vector_failures.py", "tests/envs/test_quirks.py"
SPACES, GAMES = "tests/envs/test_spaces.py", "tests/envs/test_pettingzoo.py"
EXACTNESS, SEEDS = "tests/behaviour/test_exactness.py", "tests/behaviour/test_reproducibility.py"
FAILURES, LIVES = "tests/behaviour/test_worker_failures.py", "tests/behaviour/test_worker_lives.py"

SHOWN: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "C1": (
        "rows equal a plain loop",
        {
            STREAMS: ("test_c1_rows_are_those_of_a_plain_loop",),
            EXACTNESS: ("test_single_envs", "test_live_single_env", "test_sync_vector_env", "test_async_vector_env"),
        },
    ),
    "C2": ("no transition across episodes", {STREAMS: ("test_c2_rows_of_an_episode_follow_each_other",)}),
    "C3": (
        "the policy sees the reset observation after an end",
        {
            STREAMS: ("test_c3_policy_acts_on_what_the_rows_say_it_saw",),
            EXACTNESS: ("test_the_policy_sees_the_reset_observation_first",),
        },
    ),
    "C4": (
        "is_init and trajectory ids, unique over batches and workers",
        {
            STREAMS: ("test_c4_rows_and_trajectories_are_labelled",),
            "tests/behaviour/test_backends_count.py": (
                "test_synchronous_workers_meet_the_budget_with_every_frame_in_its_place",
                "test_asynchronous_workers_meet_the_budget_with_every_frame_in_its_place",
            ),
        },
    ),
    "C5": (
        "frames are counted exactly",
        {
            STREAMS: ("test_c5_budget_is_met_to_the_frame",),
            EXACTNESS: ("test_masked_source_meets_its_budget_exactly",),
            "tests/behaviour/test_budget.py": ("test_counters_add_up_at_every_moment",),
        },
    ),
    "C6": ("the length of batches changes nothing", {STREAMS: ("test_c6_length_of_batches_changes_nothing",)}),
    "C7": (
        "envs that reuse their arrays",
        {
            STREAMS: ("test_c1_rows_are_those_of_a_plain_loop",),  # all counting copies but those in SAME_STEP mode
            VECTOR: ("test_same_step_warns_once_when_an_env_reuses_its_buffer",),
            "tests/envs/test_torch_envs.py": ("test_rows_of_reused_tensors_equal_a_plain_loop",),
        },
    ),
    "C8": ("vector envs that do not copy", {STREAMS: ("test_c1_rows_are_those_of_a_plain_loop",)}),
    "C9": ("a batch never changes", {STREAMS: ("test_c9_batches_never_change",)}),
    "C10": (
        "statistics around a vector env stay right",
        {VECTOR: ("test_a_wrapped_vector_env_is_masked_so_that_its_statistics_stay_right",)},
    ),
    "C11": (
        "manual resets",
        {
            STREAMS: ("test_c11_manual_resets_begin_new_episodes",),
            VECTOR: ("test_reset_in_mid_episode_after_an_end_and_twice_begins_anew",),
        },
    ),
    "C12": (
        "options and masks belong to their owners",
        {QUIRKS: ("test_every_partial_reset_gets_a_mask_and_options_of_its_own",)},
    ),
    "C13": ("both flags in one row", {STREAMS: ("test_c13_both_flags_may_stand_in_one_row",)}),
    "C14": ("a cut of a batch is no end", {EXACTNESS: ("test_marked_batch_edges_begin_a_trajectory_but_no_episode",)}),
    "C15": ("every kind of reward", {DIRECT: ("test_every_kind_of_reward_is_stored_unaltered",)}),
    "C16": ("every kind of observation", {DIRECT: ("test_every_kind_of_observation_arrives_as_it_was",)}),
    "C17": (
        "offset and nested spaces",
        {
            SPACES: ("test_indices_are_offset_by_start", "test_unflatten_is_the_way_back_from_flatten"),
            VECTOR: ("test_nested_observations_and_actions_travel_whole",),
        },
    ),
    "C18": (
        "spaces that are no arrays",
        {SPACES: ("test_ragged_spaces_are_refused_with_a_cure", "test_text_is_dropped_with_one_warning")},
    ),
    "C19": (
        "actions are checked before any env moves",
        {
            STREAMS: ("test_c19_wrong_action_is_refused_and_the_collector_goes_on",),
            "tests/behaviour/test_hostile_policies.py": ("test_action_out_of_range_moves_no_env",),
            QUIRKS: ("test_a_wrong_number_of_actions_is_refused_before_any_env_moves",),
        },
    ),
    "C20": (
        "Box actions are clipped for the env alone",
        {
            "tests/behaviour/test_hostile_policies.py": (
                "test_continuous_action_out_of_range_is_clipped_for_the_env_alone",
            )
        },
    ),
    "C21": (
        "action masks belong to their observations",
        {"tests/behaviour/test_masks.py": ("test_masked_action_is_never_taken",)},
    ),
    "C22": (
        "a recurrent state is the step within the episode",
        {
            STREAMS: ("test_c22_recurrent_state_is_the_step_within_the_episode",),
            "tests/behaviour/test_recurrence.py": (
                "test_state_is_the_step_within_the_episode_over_batches_and_resets",
            ),
        },
    ),
    "C23": (
        "seeds decide",
        {
            STREAMS: ("test_c23_seeds_alone_decide",),
            SEEDS: ("test_ranks_and_copies_and_adjacent_seeds_share_no_random_numbers",),
        },
    ),
    "C24": (
        "envs that use global generators",
        {WORKERS: ("test_c24_global_generators_differ_between_workers_and_repeat_with_the_seed",)},
    ),
    "C25": ("seeds are given once", {DIRECT: ("test_seeds_reach_the_copies_of_the_mask_and_are_not_given_again",)}),
    "C26": (
        "an exception of an env is named",
        {
            DIRECT: ("test_an_error_of_an_env_names_copy_call_and_error",),
            FAILURES: ("test_env_that_raises_is_named_with_its_own_traceback",),
        },
    ),
    "C27": (
        "workers that die or hang",
        {
            FAILURES: (
                "test_env_that_leaves_the_interpreter_is_named_with_its_own_traceback",
                "test_worker_that_dies_in_a_step_is_told_at_once",
                "test_worker_that_hangs_is_told_with_its_state_and_its_stack",
            ),
            QUIRKS: ("test_an_exception_that_cannot_travel_ends_the_wait",),
            VECTOR_FAILURES: ("test_close_returns_after_a_worker_died",),
        },
    ),
    "C28": (
        "workers end with their parent",
        {"tests/backends/test_nursery.py": ("test_workers_survive_ctrl_c_and_vanish_when_the_trainer_is_killed",)},
    ),
    "C29": (
        "each copy is made once, where it is stepped",
        {
            "tests/behaviour/test_processes_in_fit.py": (
                "test_each_copy_is_made_and_closed_in_the_worker_that_steps_it",
            )
        },
    ),
    "C30": ("every kind of callable travels", {WORKERS: ("test_c30_every_kind_of_callable_travels",)}),
    "C31": ("torch's threads are the parent's", {LIVES: ("test_collectors_come_and_go_without_a_trace",)}),
    "C32": ("nothing grows from one collector to the next", {LIVES: ("test_collectors_come_and_go_without_a_trace",)}),
    "C33": (
        "interruptions",
        {
            "tests/behaviour/test_life_cycle.py": (
                "test_keyboard_interrupt_closes_every_env",
                "test_keyboard_interrupt_within_an_env_closes_every_env",
            )
        },
    ),
    "C34": (
        "final observations in SAME_STEP mode",
        {
            VECTOR_FAILURES: (
                "test_same_step_without_final_obs_is_an_error",
                "test_same_step_takes_a_dense_final_obs_of_ended_rows_only",
            ),
            STREAMS: ("test_c1_rows_are_those_of_a_plain_loop",),
        },
    ),
    "C35": (
        "the autoreset mode is known",
        {
            VECTOR_FAILURES: (
                "test_an_unknown_mode_asks_for_it",
                "test_a_mode_that_somebody_wrote_into_the_base_class_is_not_believed",
            )
        },
    ),
    "C36": (
        "CartPoleVectorEnv is masked",
        {VECTOR: ("test_cartpole_vector_env_is_masked_and_never_given_a_reset_mask",)},
    ),
    "C37": (
        "AsyncVectorEnv without shared memory",
        {VECTOR: ("test_upstream_async_without_shared_memory_still_forgets_resets",)},
    ),
    "C38": (
        "values of infos keep their declared dtype",
        {
            "tests/envs/test_infos.py": ("test_read_all_takes_the_rows_that_reported",),
            QUIRKS: (
                "test_infos_and_masks_follow_their_observation_in_every_mode",
                "test_an_info_that_only_some_copies_report_is_filled_for_the_others",
            ),
        },
    ),
    "C39": (
        "a policy that gives NaN is told which copy",
        {
            STREAMS: ("test_c19_wrong_action_is_refused_and_the_collector_goes_on",),
            "tests/test_rollout_options.py": ("test_nan_logits_lose_the_batch_and_the_next_one_begins_new_episodes",),
        },
    ),
    "C40": (
        "episode metrics are those of counting",
        {
            STREAMS: ("test_c40_episode_metrics_are_those_of_counting",),
            "tests/test_evaluation.py": ("test_first_episode_of_each_copy_counts_whatever_its_length",),
        },
    ),
    "C41": (
        "Minari data sets go there and back",
        {
            "tests/conformance/test_minari.py": (
                "test_c41_rows_come_back_from_minari_with_single_steps_and_unfinished_episodes",
            ),
            "tests/offline/test_minari.py": ("test_every_kind_of_space_comes_back_as_it_was",),
        },
    ),
    "C42": ("agents that die", {GAMES: ("test_rows_of_every_agent_equal_a_plain_loop",)}),
    "C43": (
        "discounts of dm_control",
        {
            "tests/conformance/test_discounts.py": (
                "test_c43_discount_0_terminates_and_discount_1_at_the_end_truncates",
            )
        },
    ),
    "C44": (
        "speed beside a plain loop",
        {"tests/conformance/test_throughput.py": ("test_c44_collecting_keeps_up_with_a_plain_loop",)},
    ),
}
"""What is shown, and by which tests of which files."""
