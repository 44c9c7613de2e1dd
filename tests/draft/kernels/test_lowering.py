"""What can be known of the accelerators' kernels without one: they lower for real shapes, and the compilers take them.

Lowering shows that Pallas accepts a kernel: operations, blocks, types. Triton's compiler and the assembler, which are
no part of JAX, show that it fits registers and shared memory; XLA has a Triton of its own, which may choose otherwise.
With libtpu at hand, whose compiler needs no TPU, whole programs are compiled for one. None of this shows how fast a
kernel is, nor that a device computes what the interpreter does; tests/gpu does where there is a GPU.
"""

import contextlib
import importlib.util
import re
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from services.draft.kernels.base import Paging
from services.draft.kernels.cpu import library
from services.draft.kernels.pallas_gpu import gpu_attention
from services.draft.kernels.pallas_tpu import tpu_attention
from services.draft.model.layers.config import Attention
from services.draft.model.layers.pallas_backend import with_cache_for
from services.draft.model.layers.rope import Rope
from services.draft.sessions.batch import StepShape
from tests.support.draft.lowering import SLOTS, check_in_place, head_of, step_of
from tests.support.draft.ragged import Batch

# JAX has announced the end of its Triton backend.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

BF16 = "bfloat16"
BATCHES = {
    "Llama-8B, a row": Batch(1, 1, (32, 8), 128, 16, 8192, dtype=BF16),
    "Llama-8B, nodes of many": Batch(16, 4, (32, 8), 128, 16, 8192, dtype=BF16),
    "Llama-8B, a chunk": Batch(1, 256, (32, 8), 128, 64, 8192, dtype=BF16),
    "SmolLM2": Batch(4, 4, (9, 3), 64, 16, 2048, dtype=BF16),
    "Gemma 2": Batch(1, 8, (8, 4), 256, 16, 8192, dtype=BF16, window=4096, softcap=50.0),
    "gpt-oss": Batch(4, 4, (64, 8), 64, 64, 8192, dtype=BF16, window=128, sinks=True),
    "DeepSeek": Batch(1, 8, (128, 1), 576, 64, 8192, dtype=BF16, sides=1),
    "heads of 96, pages of one": Batch(1, 8, (32, 8), 96, 1, 2048, dtype=BF16),
    "float32": Batch(1, 8, (16, 8), 128, 64, 4096),
}
COMPILED = ["Llama-8B, nodes of many", "Llama-8B, a chunk", "Gemma 2", "DeepSeek"]
# What a program may take on every GPU since Ampere.
_SHARED_BYTES = 99 << 10


def device_kind(name, platform):
    """JAX traces kernels for a kind of device that this machine lacks."""
    return jax.sharding.AbstractDevice(device_kind=name, num_cores=1, platform=platform)


@contextlib.contextmanager
def as_if_on(name, platform):
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device_kind(name, platform))
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def lowered_for_gpus(batch):
    shapes = batch.shapes(SLOTS)
    with as_if_on("NVIDIA H100 80GB HBM3", "gpu"):
        kernel = partial(gpu_attention, page_size=batch.page_size, softcap=batch.softcap)
        return jax.jit(kernel).trace(*shapes, **options(batch)).lower(lowering_platforms=("cuda",))


def lowered_for_tpus(batch, sharding=None):
    shapes = batch.shapes(SLOTS, -(-batch.dim // 128) * 128)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with as_if_on("TPU v5 lite", "tpu"):
        kernel = partial(tpu_attention, page_size=batch.page_size, softcap=batch.softcap)
        return jax.jit(kernel).trace(*arguments, **options(batch, sharding)).lower(lowering_platforms=("tpu",))


def options(batch, sharding=None):
    spec = partial(jax.ShapeDtypeStruct, sharding=sharding)
    found = {}
    if batch.window:
        found["since"] = spec((batch.sessions, batch.rows), jnp.int32)
    if batch.sinks:
        found["sinks"] = spec((batch.heads[0],), batch.dtype)
    return found


@pytest.mark.parametrize("name", BATCHES)
def test_kernels_lower_for_real_shapes(name):
    batch = BATCHES[name]
    assert lowered_for_gpus(batch).as_text().count("__gpu$xla.gpu.triton") == 1
    assert lowered_for_tpus(batch).as_text().count("tpu_custom_call") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COMPILED)
def test_triton_compiles_the_kernel_without_spilling(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    text, warps, stages = triton_module(lowered_for_gpus(BATCHES[name]))
    path = tmp_path / "kernel.ttir"
    path.write_text(text)
    flags = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(str(path), target=GPUTarget("cuda", 80, 32), options=flags)
    assert compiled.metadata.shared <= _SHARED_BYTES
    # Keys come in pieces of 16 bytes, without waiting for them.
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10,", compiled.asm["ptx"])
    assert "mma.sync" in compiled.asm["ptx"]
    (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(assembler), "-v", "--gpu-name=sm_80", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report


def triton_module(lowered):
    """A kernel in Triton's language, its warps and stages."""
    from jax._src.lib.mlir import ir
    from jax._src.pallas.triton.lowering import _new_ir_context

    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            found.append(ir.DictAttr(op.attributes["mhlo.backend_config"]))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    (config,) = found
    warps, stages = (ir.IntegerAttr(config[name]).value for name in ("num_warps", "num_stages"))
    with _new_ir_context() as context:
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes, context)
        return module.operation.get_asm(enable_debug_info=False), warps, stages


# --- whole steps ---


SHAPES = [StepShape(1, 1, 1), StepShape(4, 4, 4), StepShape(1, 64, 1)]


@pytest.mark.parametrize("backend", ["plain", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_updates_its_pools_in_place(shape, backend):
    if backend == "cpu" and not library.available():
        pytest.skip("the kernels cannot be had on this machine")
    config = head_of(Attention(128, 4, 2, 16, Rope(1e4)))
    trace, pool_bytes = step_of(config, Paging(16, backend), shape, jnp.float32)
    check_in_place(trace.lower().compile(), pool_bytes)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_steps_lower_with_donated_pools(platform):
    backend, kind = {"cuda": ("pallas_gpu", "NVIDIA H100 80GB HBM3"), "tpu": ("pallas_tpu", "TPU v5 lite")}[platform]
    config = with_cache_for(head_of(Attention(256, 32, 8, 128, Rope(1e4))), backend)
    with as_if_on(kind, "gpu" if platform == "cuda" else "tpu"):
        trace, _ = step_of(config, Paging(16, backend), StepShape(4, 4, 4), jnp.bfloat16)
        text = trace.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("tf.aliasing_output") == 2  # of keys and values, and of features


# --- compiled for a TPU ---


@pytest.fixture(scope="module")
def tpu():
    """A description of a TPU to compile for."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed; a folder on PYTHONPATH will do")
    from jax.experimental import topologies

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
        yield jax.sharding.SingleDeviceSharding(device)


@pytest.mark.parametrize("name", BATCHES)
def test_libtpu_compiles_the_kernel_without_copies(tpu, name):
    batch = BATCHES[name]
    compiled = lowered_for_tpus(batch, tpu).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 22  # a pool has tens of times as much


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (8, 1, 256)])
def test_a_step_on_a_tpu_updates_its_pools_in_place(tpu, heads, kv_heads, dim):
    config = with_cache_for(head_of(Attention(256, heads, kv_heads, dim, Rope(1e4))), "pallas_tpu")
    with as_if_on("TPU v5 lite", "tpu"):
        trace, pool_bytes = step_of(config, Paging(16, "pallas_tpu"), StepShape(4, 4, 4), jnp.bfloat16, tpu)
        check_in_place(trace.lower(lowering_platforms=("tpu",)).compile(), pool_bytes)
