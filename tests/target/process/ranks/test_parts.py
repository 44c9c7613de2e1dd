"""What a rank has of a model, and how batches are sent to it, without a second rank."""

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError
from services.target.model.parallel import split
from services.target.model.parallel.shard import Shard
from services.target.process.ranks.batches import pack, unpack
from services.target.step.batch import Batch, Capture, TokenArrays
from services.target.step.layout import Layout


def test_a_style_of_plans_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="in the style sequence_parallel, which is not supported"):
        split._exchange("layer.3", torch.nn.LayerNorm(4), "sequence_parallel", None)


@pytest.mark.parametrize(("shard", "part"), [
    (Shard(0, 6, 1, 3, 6), [3, 4, 5]), (Shard(0, 6, 2, 1, 3), [1, 2, 4, 5]), (Shard(0, 6, 1, 4, 5), [4]),
])  # fmt: skip
def test_a_part_is_an_interval_of_each_group(shard, part):
    whole = torch.arange(6)[:, None] * torch.ones(2)
    assert shard.part(whole)[:, 1].tolist() == part
    assert shard.whole_shape((len(part), 2)) == (6, 2)


def test_one_expert_has_its_part_of_what_is_stacked():
    stacked = torch.arange(2 * 8 * 3).view(2, 8, 3)  # two experts, gates above values
    shard = Shard(1, 8, 2, 2, 4)
    of_matrix = shard.of_matrix(2)
    mine = torch.cat([of_matrix.part(matrix) for matrix in stacked[1].chunk(2)])
    assert torch.equal(mine, shard.part(stacked)[1])
    assert shard.of_matrix(1) is None
    assert Shard(0, 2, 1, 0, 1).of_matrix(2) is None
    assert torch.equal(Shard(2, 3, 1, 0, 2).of_matrix(2).part(stacked[1][:4]), stacked[1][:4, :2])


def test_batches_are_broadcast_completely():
    rng = np.random.default_rng(0)
    starts, committed, parents = [0, 37, 16], [5, 1, 3], [[], [-1, 0, 0, -1], [-1]]
    nodes = list(map(len, parents))
    keys = np.array(starts) + committed + nodes
    pages = rng.integers(1, 99, int((-(-keys // 16)).sum())).astype(np.int32)
    layout = Layout.of(starts, committed, nodes, pages, np.concatenate(parents).astype(np.int32), 16)
    rows = int(layout.first[-1])
    flat = TokenArrays(*rng.integers(0, 9, (2, rows)), np.array([4, 5, 6]))
    batch = Batch(layout, flat, torch.device("cpu"), 2, Capture((1, 4), False, np.array([2])))
    twin = unpack(np.concatenate(pack(batch)).astype(np.int64), torch.device("cpu"), None)
    assert (twin.sample_count, len(twin.spans)) == (2, 3)
    assert twin.capture == Capture((1, 4), False, None)
    assert np.array_equal(twin.layout.slots, layout.slots)
    for name in ("ids", "positions", "sampled"):
        assert np.array_equal(getattr(twin.rows, name), getattr(flat, name))
    for mine, its in zip(batch.spans, twin.spans, strict=True):
        for name in ("first", "rows", "start", "committed", "page_size"):
            assert getattr(mine, name) == getattr(its, name)
        for name in ("pages", "positions", "parents", "slots", "tree_mask"):
            assert np.array_equal(getattr(mine, name), getattr(its, name))
