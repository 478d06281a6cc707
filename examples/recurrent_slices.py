# Q-learning with memory from a replay buffer: a sign at the door says where to turn, 5 to 8 steps later. Slices of 4
# steps never show both: each is unrolled from the state that the policy had when it acted, stored with its first row.
# Expected: a mean return of 1.0 (0.0 at random, and also if slices start from zeros); runs in a quarter of a minute.
import os

import gymnasium
import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lit_collect import CollectionMonitor, CollectorDataModule, EvaluationConfig, ReplayConfig, UpdateConfig
from lit_collect.replay import SliceSampler
from trainers.dqn import DQN
from trainers.off_policy import target_of
from trainers.off_policy_functional import epsilon_greedy_logits, huber_loss, q_target
from trainers.q_networks import EpsilonGreedy


class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))  # the sign, -1 or 1, and whether it is time to turn
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._way, self._steps_left = self.np_random.integers(2), self.np_random.integers(5, 9)
        return np.array([2 * self._way - 1, 0], np.float32), {}

    def step(self, action):
        self._steps_left -= 1
        reward = 0 if self._steps_left else 1 if action == self._way else -1
        return np.array([0, self._steps_left == 1], np.float32), reward, self._steps_left == 0, False, {}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # [S, L, 2] and [S, 32]
        memory, state = self.memory(observation, state.unsqueeze(0).contiguous())
        return self.head(memory), state.squeeze(0)


class Policy(EpsilonGreedy):
    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(num_envs, 32)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        value, state = self.network(observation.unsqueeze(1), state)
        return {"logits": epsilon_greedy_logits(value.squeeze(1), self.epsilon)}, state


class RecurrentDQN(DQN):
    def build_networks(self, observation_spec, action_spec) -> None:
        self.policy = Policy(Network())
        self.target = target_of(self.policy.network)

    def training_step(self, sample, batch_idx=0) -> Tensor:
        # All of a slice is of one episode: what the last of its rows led to, padded or not, goes after the others.
        seen = torch.cat([sample["observation"][:, :1], sample["next", "observation"]], 1)
        value, later = (network(seen, sample["state"][:, 0])[0] for network in (self.policy.network, self.target))
        rows, valid = self.rows(sample), sample["collector", "mask"]  # short slices are padded; mask more for a burn-in
        target = q_target(self.reward(rows), self.discount(rows), later[:, 1:][valid], chooser=value[:, 1:][valid])
        return huber_loss(value[:, :-1][valid].gather(-1, rows["action"].unsqueeze(-1)).squeeze(-1), target.detach())


L.seed_everything(1)
torch.set_num_threads(1)
data = CollectorDataModule(
    Corridor,
    frames_per_batch=64,
    total_frames=int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 16_000)),
    replay=ReplayConfig(capacity=4_000, batch_size=128, sampler=SliceSampler(4, strict_length=False), min_frames=256),
    updates=UpdateConfig(updates_per_batch=8),
    evaluation=EvaluationConfig(num_episodes=100),
)
trainer = L.Trainer(accelerator="cpu", max_epochs=-1, callbacks=[CollectionMonitor()], enable_progress_bar=False)
trainer.fit(RecurrentDQN(learning_rate=3e-3, gamma=0.95), datamodule=data)
print(f"mean return of 100 episodes: {trainer.callback_metrics['eval/return_mean']:.2f}")
