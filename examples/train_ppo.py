# PPO on CartPole-v1 through Trainer.fit: three lines of wiring, then an evaluation of 20 episodes.
# Expected: a mean return of 500 after 100,000 frames, in about a quarter of a minute on one core.
# Everything a config can say can be said here; see configs/ppo_cartpole.yaml for the same run from the command line.
import os

import lightning as L

from lit_collect import (
    CollectionMonitor,
    CollectorDataModule,
    EvaluationConfig,
    FrameProgress,
    UpdateConfig,
    WeightSync,
)
from trainers import PPO


def main() -> None:
    L.seed_everything(1)
    data = CollectorDataModule(
        "CartPole-v1",
        num_envs=8,
        frames_per_batch=256,
        total_frames=int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 100_000)),
        updates=UpdateConfig(epochs=20, minibatch_size=256),
        evaluation=EvaluationConfig(num_episodes=20),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,  # the frame budget ends the run
        callbacks=[WeightSync(), CollectionMonitor(), FrameProgress()],
        enable_model_summary=False,
    )
    trainer.fit(PPO(learning_rate=1e-3, gamma=0.98, lambda_=0.8, anneal=True), datamodule=data)
    print(f"mean return of 20 episodes: {float(trainer.callback_metrics['eval/return_mean']):.1f}")


if __name__ == "__main__":
    main()
