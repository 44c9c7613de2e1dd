"""Settings that must precede imports of numeric libraries: threads of shared cores, and repeatable results."""

import gc
import logging
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is what tests spend their time on; fused loops take twice as long. Later versions of XLA crash without them.
if metadata.version("jaxlib").startswith("0.10."):
    # Nor are LLVM's costly passes worth their time for programs that run a few times, nor parts of one on more threads.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
        "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1",
    )
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# No public authorities: each client of HTTP would read all of them, for longer than its request takes.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Compiled programs, converted models and code that comes with a checkpoint stay out of the user's own caches.
os.environ.setdefault("OUTRIDER_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "outrider"))
os.environ.setdefault("HF_MODULES_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "modules"))
# Without a GPU, Triton's kernels are run by its interpreter; it wants to know before anything imports it.
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("outrider")

gc.set_threshold(50_000, 20, 10)  # the libraries' millions of objects stay: looking through them again took a tenth

# Folders of tests that start processes.
_STARTING = frozenset({"bench", "gateway", "ops", "system", "supervisor", "process"})
# Files that compute for longest, most of a minute or more.
_LONG = frozenset({
    "test_vectors.py", "test_mesh.py", "test_train.py", "test_triton.py", "test_fused.py", "test_compiled.py",
    "test_invariance.py", "test_deterministic.py", "test_unroll.py", "test_mtp.py", "test_fused_loop.py",
    "test_local_eagle_head.py",
})  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Cases that samples leave out are long, and tests come in an order that keeps all workers busy."""
    places: dict[tuple, dict[tuple, int]] = {}  # of the values of each test's parameters, in the order of their cases
    for item in items:
        if sample := item.get_closest_marker("sampled"):
            place = 0
            for axis in _axes(item):
                values = places.setdefault((item.path, item.originalname, axis), {})
                place += values.setdefault(tuple(id(item.callspec.params[name]) for name in axis), len(values))
            if place % sample.args[0]:
                item.add_marker(pytest.mark.long)
    _spread(items)


def _axes(item):
    """A test's parameters; those whose values are given together are one axis."""
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(tuple(name.strip() for name in names))
    return axes + [(name,) for name in item.callspec.params if not any(name in axis for axis in axes)]


def _spread(items):
    """Files whose tests start processes are spread among those that compute, so that few of them run at once.

    Neither they nor the long ones are among the last, for which other workers would wait.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    places: dict[Path, float] = {}
    for starts in (True, False):
        some = [path for path in files if bool(_STARTING.intersection(path.parts)) == starts]
        some.sort(key=lambda path: path.name not in _LONG)
        places |= {path: (i + 0.5) / len(some) * (0.8 if starts else 1.0) for i, path in enumerate(some)}
    items[:] = [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


def pytest_runtest_setup(item):
    """PyTorch has one thread, as tests share the cores: more would spin for one another's. Processes keep theirs."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(2 if item.get_closest_marker("threads") else 1)


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """A test that runs a process's main in this one sets logging up as that process would."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
