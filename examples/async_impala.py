# Actor and learner at the same time: two worker processes collect while IMPALA learns from what they have.
# V-trace corrects for rows that were acted by older weights; none is older than 8 versions. Through Trainer.fit; the
# same run from the command line is configs/impala_cartpole.yaml.
# Expected: a mean return of 500 after 200,000 frames, in about a quarter of a minute on two cores.
import os

import lightning as L
import torch

from lit_collect import (
    CollectionMonitor,
    CollectorDataModule,
    EvaluationConfig,
    FrameProgress,
    ProcessBackend,
    WeightSync,
)
from trainers import IMPALA

L.seed_everything(1)
torch.set_num_threads(1)  # the other cores are for the workers
data = CollectorDataModule(
    "CartPole-v1",
    num_envs=16,  # 8 in each worker
    frames_per_batch=256,  # [8, 32], of one worker
    total_frames=int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 200_000)),
    evaluation=EvaluationConfig(num_episodes=20),
    backend=ProcessBackend(num_collectors=2, sync=False),
)
monitor = CollectionMonitor()
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=-1,  # the frame budget ends the run
    gradient_clip_val=1.0,
    callbacks=[WeightSync(every_n_steps=1, max_staleness=8), monitor, FrameProgress()],
    enable_model_summary=False,
)
module = IMPALA(learning_rate=2e-3, entropy_coefficient=0.003, reward_scale=0.05, anneal=True)
trainer.fit(module, datamodule=data)
print(f"mean return of 20 episodes: {monitor.latest['eval/return_mean']:.1f}")
print(f"age of the rows of the last batch: {monitor.latest['policy/staleness_mean']:.1f} versions")
