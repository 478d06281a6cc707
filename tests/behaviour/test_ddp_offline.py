"""Two ranks that learn from the same offline rows in one mapped storage: one of them writes it, both read all of it."""

import pytest
import torch

from lit_collect import Collector
from lit_collect.offline.episodes import as_rows
from lit_collect.offline.memory_maps import RowWriter, read_rows
from lit_collect.testing import CountingEnv
from tests.behaviour.test_ddp import ROOT, start
from tests.behaviour.two_ranks import RANKS
from tests.behaviour.two_ranks_offline import BATCH_SIZE

pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(300)]


def test_ranks_share_a_mapped_storage_that_one_of_them_fills_and_a_second_run_finds(tmp_path):
    with (
        Collector(CountingEnv, num_envs=10, frames_per_batch=20 * BATCH_SIZE, seed=0) as collector,
        RowWriter(tmp_path / "rows", {}) as writer,
    ):
        writer.write(as_rows(collector.collect()))
    rows = read_rows(tmp_path / "rows")[0]
    for _ in range(2):
        ended = start(ROOT / "tests" / "behaviour" / "two_ranks_offline.py", tmp_path / "rows", tmp_path)
        assert ended.returncode == 0, ended.stderr[-5000:]
        drawn = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
        for samples in drawn:
            assert samples["index"].sort().values.tolist() == list(range(len(rows)))
            assert torch.equal(samples["observation"], rows["observation"][samples["index"]])
        assert not torch.equal(drawn[0]["index"], drawn[1]["index"])
