"""Tensor-parallel ranks on GPUs: NCCL inside captured steps, overlap, and texts of one rank. Run by `make gpu`.

With one GPU a single rank plays all parts: it broadcasts to no other, but captures and replays the same collectives.
With two, one model is divided between them.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.model.base import Outputs
from services.target.model.cuda.graphs import CudaCapturer, GraphRunner, RankCapturer
from services.target.model.loading.load import load
from services.target.model.parallel.exchange import join_columns, sum_of_ranks
from services.target.process.control import Control, Update
from services.target.process.ranks import group
from services.target.process.ranks.leading import LeadingRunner
from services.target.process.ranks.processes import load_split
from services.target.process.warmup import warm_up
from services.target.speculation.modes.mode import SpeculationMode
from tests.support.target.driving import chain, counting, opening, run
from tests.support.target.proposals import Drafts
from tests.support.tiny import write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    base = tmp_path_factory.mktemp("models")
    return [write_model(base / str(seed), seed=seed) for seed in (1, 2)]


def engine_of(model, folder, **flags):
    config = TargetConfig(model_path=str(folder), max_total_tokens=4096, speculative_num_draft_tokens=6, **flags)
    engine = TargetEngine(model, config)
    warm_up(engine)
    return counting(engine, "launch_behind", "behind")


def alone(folder):
    config = TargetConfig(model_path=str(folder), device="cuda:0", dtype="float32")
    return engine_of(load(Path(folder), config), folder)


def requests():
    return [opening(i, [5 + i] * (1 + 7 * i), SamplingParams(i / 4, seed=i), max_tokens=24) for i in range(4)]


def near(expected):
    return lambda i, path: [chain(i, path, expected[i][len(path) - 1 - 7 * i :][:3])]


@pytest.fixture
def one_rank():
    config = TargetConfig(device="cuda:0")
    channel = group.join(group.host(Path(), config), 0, config)
    yield channel
    dist.destroy_process_group()


@torch.inference_mode()
def test_collectives_are_captured(one_rank):
    x = torch.ones(4, 8, device="cuda")
    summed = sum_of_ranks(x.clone())  # makes the communicator
    torch.testing.assert_close(summed, x)
    replay = RankCapturer(CudaCapturer("thread_local"))(lambda: Outputs(join_columns(sum_of_ranks(x * 2), 8)))
    for value in (1.0, 3.0):
        x.fill_(value)
        torch.testing.assert_close(replay().logits, torch.full_like(x, 2 * value))


def test_what_rank_0_broadcasts_does_not_change_a_text(one_rank, folders):
    expected = run(alone(folders[0]), requests())
    model = load(Path(folders[0]), TargetConfig(model_path=str(folders[0]), device="cuda:0", dtype="float32"))
    engine = engine_of(replace(model, runner=LeadingRunner(model.runner, one_rank, model.device)), folders[0])
    assert engine.overlap
    found = run(engine, requests())
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert engine.behind > found.steps / 2
    drafted = run(engine, requests(), near(expected.new))
    assert drafted.new == expected.new
    assert drafted.accepted > 0
    ready = TargetEngine(engine.model, TargetConfig(max_total_tokens=4096), [SpeculationMode.DRAFT_IF_READY])
    warm_up(ready)
    counting(ready, "_launch_prepared", "prepared")
    drafted = run(ready, requests(), Drafts("mixed", requests(), expected.new))
    assert drafted.new == expected.new
    assert drafted.accepted > 0
    assert ready.prepared > 2


@pytest.fixture(params=[False, True], ids=["captured", "eager"])
def divided(folders, request):
    deaths = []
    config = TargetConfig(
        model_path=str(folders[0]), device="cuda:0,cuda:1", dtype="float32", tp_size=2,
        disable_cuda_graph=request.param,
    )  # fmt: skip
    model, ranks = load_split(Path(folders[0]), config, deaths.append)
    yield engine_of(model, folders[0], tp_size=2, disable_cuda_graph=request.param)
    ranks.stop()
    assert not deaths


@two
def test_the_text_is_that_of_one_rank(divided, folders):
    inner = divided.model.runner.runner
    assert not isinstance(inner, GraphRunner) or inner.works
    expected = run(alone(folders[0]), requests())
    found = run(divided, requests())
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert divided.behind > found.steps / 2
    drafted = run(divided, requests(), near(expected.new))
    assert drafted.new == expected.new
    assert drafted.accepted > 0


@two
def test_new_weights_reach_both_ranks(divided, folders):
    control = Control(divided, folders[0], roots=[str(folders[0].parent)])
    control.update_from_folder(control.read_folder(str(folders[1])), Update())
    assert run(divided, requests()).new == run(alone(folders[1]), requests()).new


@two
def test_quantized_parts_give_text(folders):
    pytest.importorskip("torchao")
    config = TargetConfig(model_path=str(folders[0]), device="cuda", dtype="bfloat16", tp_size=2, quantization="int8")
    try:
        model, ranks = load_split(Path(folders[0]), config, lambda _: None)
    except ConfigError as error:
        pytest.fail(error.message)
    assert run(engine_of(model, folders[0], tp_size=2), requests()).new
    ranks.stop()
