"""What other houses call the values that `CollectionMonitor` logs."""

NAMES: dict[str, dict[str, str]] = {
    "lit": {},
    "sb3": {
        "collect/frames_total": "time/total_timesteps",
        "time/fps": "time/fps",
        "episode/return_mean": "rollout/ep_rew_mean",
        "episode/length_mean": "rollout/ep_len_mean",
        "episode/success_rate": "rollout/success_rate",
        "episode/count_total": "time/episodes",
        "eval/return_mean": "eval/mean_reward",
        "eval/length_mean": "eval/mean_ep_length",
    },
    "cleanrl": {
        "collect/frames_total": "global_step",
        "time/fps": "charts/SPS",
        "episode/return_mean": "charts/episodic_return",
        "episode/length_mean": "charts/episodic_length",
        "eval/return_mean": "eval/episodic_return",
    },
}
"""By house: our name and theirs, where they have one for the same value."""
