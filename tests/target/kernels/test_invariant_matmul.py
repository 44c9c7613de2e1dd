"""Products and sums of rows on CUDA, run by Triton's interpreter: correct and batch-invariant."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from services.target.engine.engine import TargetEngine
from services.target.kernels.dispatch import choose
from services.target.model.deterministic import batch_invariance, invariant_mode
from services.target.model.deterministic import selection as deterministic
from tests.support.checkpoints.families import write_family
from tests.support.target.cuda.interpreter import need_interpreter
from tests.support.target.driving import chain, load_model, opening, random_tree, run
from tests.support.tiny import VOCAB

need_interpreter()

from services.target.kernels.cuda import invariant_matmul  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}

LAYERS = {"gpt-oss": {"layer_types": ["sliding_attention"]}}


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch):
    """The interpreter multiplies tiles by NumPy, whose sums depend on a row's place in the tile; a GPU's do not."""
    plain = np.matmul

    def matmul(a, b, **options):
        return plain(a.astype(np.float64), b.astype(np.float64)).astype(options.get("dtype", a.dtype))

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(dtype):
    torch.manual_seed(0)
    for rows, inputs, outputs, groups in ((1, 70, 5, 1), (65, 100, 130, 1), (6, 33, 20, 3), (130, 20, 7, 2)):
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(groups, inputs, outputs).to(dtype).transpose(1, 2)
        bias = torch.randn(groups, outputs).to(dtype)
        found = invariant_matmul.product(x, weight, bias, groups)
        per_group = x.double().view(groups, -1, inputs) @ weight.double().transpose(1, 2) + bias.double()[:, None]
        torch.testing.assert_close(
            found.double(), per_group.view(rows, outputs), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        if groups == 1:
            for row in {0, rows // 2, rows - 1}:
                alone = invariant_matmul.product(x[row : row + 1], weight, bias, 1)
                assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_groups_of_any_size(dtype):
    torch.manual_seed(1)
    counts = torch.tensor([0, 3, 70, 0, 1, 40, 0])
    x, weight = torch.randn(114, 24).to(dtype), torch.randn(7, 10, 24).to(dtype)
    found = invariant_matmul.grouped(x, weight, None, counts)
    first = 0
    for group, count in enumerate(counts.tolist()):
        expected = invariant_matmul.product(x[first : first + count], weight[group : group + 1], None, 1)
        assert torch.equal(found[first : first + count], expected)
        first += count


def test_a_captured_product_reads_nothing_but_its_operands(monkeypatch):
    """A captured launch reads the same addresses for as long as the process lives."""
    read: list[int] = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **_: read.extend(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))

    monkeypatch.setattr(invariant_matmul, "_product", Kernel())
    x, weight, bias = torch.randn(6, 5), torch.randn(3, 4, 5), torch.randn(3, 4)
    y = invariant_matmul.product(x, weight, bias, 3)
    assert set(read) == {tensor.data_ptr() for tensor in (x, weight, bias, y)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype):
    torch.manual_seed(2)
    for width in (1, 5, 1024, 2500):
        x = torch.randn(3, 4, width).to(dtype)
        found = invariant_matmul.row_sums(x, float(width))
        torch.testing.assert_close(found.double(), x.double().mean(-1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(invariant_matmul.row_sums(x[1:2, 2:3], float(width))[0, 0], found[1, 2])


@pytest.mark.long
@pytest.mark.parametrize("family", ["olmo-2", "gpt-oss"])
def test_a_model_on_these_kernels(family, tmp_path, monkeypatch):
    """The model passes the batch-invariance check, and its text does not depend on proposals."""
    folder = write_family(tmp_path, family, num_hidden_layers=1, **LAYERS.get(family, {}))
    requests = [opening(i, list(range(5, 9 + 3 * i)), max_tokens=4) for i in range(2)]
    config = TargetConfig(max_total_tokens=256, speculative_num_draft_tokens=6)
    expected = run(TargetEngine(load_model(folder), config), requests).new
    mode = invariant_mode.BatchInvariantMode(invariant_mode.CudaKernels(), functions=True)
    monkeypatch.setattr(invariant_mode, "of", lambda device: mode)
    monkeypatch.setattr(batch_invariance, "_NEIGHBOURS", ((), (17, 2)))
    assert choose("triton", torch.device("cpu"), ordered=True)
    model = load_model(folder, attention_backend="triton", deterministic=True)
    assert deterministic.invariant_mode.of(model.device) is mode
    rng = np.random.default_rng(0)

    def proposals(session, path):
        right = chain(session, path, expected[session][len(path) - len(requests[session].tokens) :][:3])
        return [random_tree(rng, session, path, VOCAB, 3), right]

    result = run(TargetEngine(model, config), requests, proposals)
    assert result.new == expected
    assert result.accepted > 0
