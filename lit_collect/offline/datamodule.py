"""`OfflineDataModule`: rows that were collected before, as samples for `Trainer.fit`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from lit_collect.config import EvaluationConfig, RolloutConfig, at_least, settings
from lit_collect.envs.factories import EnvLike, resolve_env
from lit_collect.envs.probe import SpaceProbe
from lit_collect.envs.spaces import describe_space
from lit_collect.evaluated import EvaluatedDataModule
from lit_collect.learner import initialise_lazy, policy_of, required_policy
from lit_collect.offline.buffers import OfflineSampling, mark_of
from lit_collect.offline.sources import OfflineRows, check_spaces, open_offline
from lit_collect.replay.buffer import ReplayBuffer
from lit_collect.replay.samplers import Sampler
from lit_collect.replay.storage import Storage
from lit_collect.replay.transforms import SampleTransform
from lit_collect.seeding import Placement, Stage, resolve_entropy

_SECONDS = ("env_s", "policy_s", "transfer_s", "busy_s", "collect_s", "weight_sync_s")


class OfflineLoader:
    """Samples of a buffer as a sized iterable, for one epoch at a time."""

    def __init__(self, sample: Callable[[], TensorDictBase], length: int) -> None:
        self._sample, self._length = sample, length
        self._delivered = 0  # samples of the running epoch
        self._resumed_at = 0  # samples of the coming epoch that an earlier run delivered

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Draw the samples of an epoch, each when it is asked for."""
        self._delivered, self._resumed_at = self._resumed_at, 0
        while self._delivered < self._length:
            self._delivered += 1
            yield self._sample()

    def state_dict(self) -> dict[str, Any]:
        """Where the running epoch stands."""
        return {"delivered": self._delivered % self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch."""
        self._resumed_at = state["delivered"]


class OfflineDataModule(EvaluatedDataModule):
    """Feeds `Trainer.fit` with samples of rows that were collected before, as a replay buffer would.

    It takes what ``lit-collect collect`` writes, and any Minari data set. The rows are read when a fit is set up, or
    when the first sample is needed, into a `ReplayBuffer` of their number; nothing is written to it afterwards. Any
    module that trains on samples of a buffer can be fitted. If it defines
    ``configure_spaces(observation_spec, action_spec)``, it is told both specs of the data. Each rank of several draws
    samples of its own from all rows.

    Args:
        path: the folder of a Minari data set or of a memory-mapped TensorDict of rows, or the id of a data set that
            Minari has downloaded.
        batch_size: rows of a sample of one rank, over all of its slices.
        updates_per_epoch: samples of an epoch.
        slice_len: rows of each slice, [batch_size / slice_len, slice_len]; None for single rows.
        sampler: how rows are chosen: a `Sampler` or its name (see `ReplayBuffer`); none that uses rows up.
        transforms: what is done to each sample, for instance `NStep`.
        storage: where the rows lie: ``"memory"``, ``"mapped"`` or a `Storage`; a mapped one is filled once, found again
            by later runs, and shared by the ranks of one machine.
        storage_path: the folder of ``storage="mapped"``, of this data set alone.
        info_keys: of a Minari data set, which infos become keys of the rows (see `RolloutConfig.info_keys`).
        env: where the policy is evaluated (see `CollectorDataModule`), with the spaces of the data; None for nowhere.
        evaluation: episodes of a validation or test run, on each rank; None for none.
        seed: of samples and evaluation; None takes the one of `seed_everything`, else a fresh one.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if it holds no data, or a setting is out of range.
        ModuleNotFoundError: if Minari is needed and not installed.
        LitCollectError: if the data cannot be read.

    Example:
        >>> import tempfile, torch
        >>> from lit_collect import Collector
        >>> from lit_collect.offline.episodes import as_rows
        >>> from lit_collect.offline.memory_maps import RowWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=64, seed=0) as collector:
        ...     with RowWriter(folder.name, {}) as writer:
        ...         writer.write(as_rows(collector.collect()))
        >>> data = OfflineDataModule(folder.name, batch_size=32, updates_per_epoch=10, seed=0)
        >>> [sample.shape for sample in data.train_dataloader()][:2], len(data.train_dataloader())
        ([torch.Size([32]), torch.Size([32])], 10)
        >>> data.close(), folder.cleanup()
        (None, None)
    """

    def __init__(
        self,
        path: str,
        *,
        batch_size: int = 256,
        updates_per_epoch: int = 1000,
        slice_len: int | None = None,
        sampler: Sampler | str = "uniform",
        transforms: Sequence[SampleTransform] = (),
        storage: Storage | str = "memory",
        storage_path: str | None = None,
        info_keys: Sequence[str] = (),
        env: EnvLike | None = None,
        evaluation: EvaluationConfig | None = EvaluationConfig(),
        seed: int | None = None,
    ) -> None:
        super().__init__()
        at_least("updates_per_epoch", updates_per_epoch, 1)
        self._sampling = OfflineSampling(
            batch_size=batch_size,
            slice_len=slice_len,
            sampler=sampler,
            storage=storage,
            storage_path=storage_path,
            transforms=transforms,
        )
        if evaluation is not None:
            evaluation = settings(EvaluationConfig, evaluation, "evaluation")
        self.path = path
        self.batch_size = batch_size
        self._data: OfflineRows = open_offline(path, tuple(info_keys))
        if batch_size > self._data.num_rows and slice_len is None:
            rank_zero_warn(f"batch_size={batch_size} is more than the {self._data.num_rows} rows at {path}")
        self._entropy = resolve_entropy(seed) if seed is not None else None
        self._buffer: ReplayBuffer | None = None
        self._drawn, self._dims = 0, 1  # rows handed out, dimensions of the last sample
        self._state: dict[str, Any] | None = None  # of the buffer that is to come
        self._loader = OfflineLoader(self.sample, updates_per_epoch)
        self._source = None if env is None else resolve_env(env)
        self._probe = None if self._source is None else SpaceProbe(self._source)
        self._rollout = RolloutConfig()
        self._evaluate(self._source, evaluation, rollout=self._rollout, policy=self._acting_policy)
        self.save_hyperparameters(
            {
                "path": str(path),
                "batch_size": batch_size,
                "updates_per_epoch": updates_per_epoch,
                "slice_len": slice_len,
                "evaluation": None if evaluation is None else asdict(evaluation),
                "seed": seed,
            },
            logger=False,
        )

    # --- what others read ---------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows of the data."""
        return self._data.num_rows

    @property
    def observation_spec(self) -> dict[str, Any] | None:
        """The observation space as plain data; of the env if the data do not say it, None if there is none either."""
        found = self._data.observation_spec
        return describe_space(self._probe.spaces()[0]) if found is None and self._probe is not None else found

    @property
    def action_spec(self) -> dict[str, Any] | None:
        """The action space as plain data (see `observation_spec`)."""
        found = self._data.action_spec
        return describe_space(self._probe.spaces()[1]) if found is None and self._probe is not None else found

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """The buffer of all rows, filled when it is first asked for."""
        if self._buffer is None:
            self._buffer = self._sampling.buffer_of(self._data, self._place("train").replay_seed)
            if self._state is not None:
                self._buffer.load_draw_state(self._state)
        return self._buffer

    @property
    def total_frames(self) -> int:
        """Rows that will have been handed out at the end of the fit, over all ranks; -1 if it has none."""
        trainer = self.trainer
        if trainer is None:
            return -1
        ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            ends.append(trainer.max_epochs * len(self._loader))
        return min(ends) * self.batch_size * trainer.world_size if ends else -1

    @property
    def progress(self) -> float:
        """How much of `total_frames` was handed out, from 0 to 1 (0 if the fit has no end)."""
        return 0.0 if self.total_frames < 1 else min(self.frames_total / self.total_frames, 1.0)

    @property
    def frames_total(self) -> int:
        """Rows handed out so far, over all ranks: what takes the place of collected frames in logs."""
        return self._drawn * (1 if self.trainer is None else self.trainer.world_size)

    @property
    def copies_total(self) -> None:
        """There are no env copies to collect with."""

    @property
    def policy_version(self) -> int:
        """Nobody acts: always 0."""
        return 0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent on collecting: none."""
        return dict.fromkeys(_SECONDS, 0.0)

    def statistics(self) -> dict[str, Any]:
        """There is no collector that could tell any."""
        return {}

    def publish_in_between(self) -> None:
        """There is nobody to publish weights to."""

    def sample(self) -> TensorDictBase:
        """One sample: [batch_size] rows, or slices."""
        sample = self.replay_buffer.sample()
        self._drawn, self._dims = self._drawn + sample.numel(), sample.batch_dims
        return sample

    def update_priority(self, sample: TensorDictBase, priority: Tensor) -> None:
        """Give new priorities to the rows of a sample; nothing happens without a prioritized sampler.

        Args:
            sample: as it was handed out.
            priority: one number of at least 0 for each of its rows.
        """
        self.replay_buffer.update_priority(sample, priority)

    def __str__(self) -> str:
        """The settings."""
        return f"{type(self).__name__}(path={str(self.path)!r}, rows={self.num_rows}, batch_size={self.batch_size})"

    # --- Lightning's hooks --------------------------------------------------------------------------------------

    @override
    def setup(self, stage: str) -> None:
        """Tell a module that wants to know about the spaces, initialise lazy layers of the policy, and read the rows.

        Raises:
            ValueError: if nobody says what the spaces are, the env has others than the data, or a mapped storage holds
                other data.
        """
        if self._probe is not None:
            self._check_env(self._probe)
        module = None if self.trainer is None else self.trainer.lightning_module
        configure = getattr(module, "configure_spaces", None)
        if configure is not None:
            if self.observation_spec is None or self.action_spec is None:
                raise ValueError(
                    f"nobody says what the spaces of the rows at {self.path} are : expected lit_collect.json beside "
                    f"them, or env=..."
                )
            configure(self.observation_spec, self.action_spec)
        policy = policy_of(module)
        if stage == "fit" and policy is not None and self._source is not None:
            place = self._place("train")
            initialise_lazy(policy, module, source=self._source, rollout=self._rollout, place=place)
        if stage == "fit":
            self.replay_buffer  # noqa: B018  # what does not fit is refused before anything runs

    @override
    def train_dataloader(self) -> OfflineLoader:
        """The samples of an epoch; the same stream at every call."""
        return self._loader

    @override
    def state_dict(self) -> dict[str, Any]:
        """Random state and sampler (priorities, for instance), not the rows: these are read again."""
        if self._buffer is None:
            return {"buffer": self._state, "drawn": self._drawn}
        return {"buffer": {**mark_of(self._data), **self._buffer.draw_state()}, "drawn": self._drawn}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Draw on where another run was left.

        Raises:
            ValueError: if it was of other data, or of another sampler.
        """
        state = state_dict["buffer"]
        if state is not None:
            self._sampling.check_state(state, self._data)
        self._state, self._drawn = state, state_dict["drawn"]
        if self._buffer is not None and state is not None:
            self._buffer.load_draw_state(state)

    def close(self) -> None:
        """Close all envs and the buffer; may be called again."""
        self._state = self.state_dict()["buffer"]
        buffer, self._buffer = self._buffer, None
        try:
            if buffer is not None:
                buffer.close()
            if self._evaluations is not None:
                self._evaluations.close()
        finally:
            if self._probe is not None:
                self._probe.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _check_env(self, probe: SpaceProbe) -> None:
        """Raise unless what plays in the env can be trained on the data; the env that tells is closed again."""
        of_data = {"observation space": self._data.observation_spec, "action space": self._data.action_spec}
        try:
            spaces = probe.spaces()
            check_spaces(self.path, of_data, dict(zip(of_data, map(describe_space, spaces), strict=True)))
        finally:
            probe.close()

    def _acting_policy(self) -> Any:
        return required_policy(None if self.trainer is None else self.trainer.lightning_module)

    @property
    def _sample_dims(self) -> int:
        return self._dims

    def _place(self, stage: Stage) -> Placement:
        if self._entropy is None:
            self._entropy = resolve_entropy(None)
        rank, ranks = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        return Placement(entropy=self._entropy, stage=stage, rank=rank, world_size=ranks, default_envs=1)
