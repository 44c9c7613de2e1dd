"""`python -m bench [NAME] [flags]`: runs one benchmark, or all of them; results go to docs/benchmarks/."""

from __future__ import annotations

import importlib
import shutil
import signal
import sys

BENCHMARKS = {
    "streams": "bench.streams.run",
    "system": "bench.system",
    "accept": "bench.accept",
    "online": "bench.online",
    "target": "bench.target",
    "draft": "bench.draft",
    "draft-kernels": "bench.draft_kernels",
    "quality": "bench.quality",
    "deterministic": "bench.deterministic",
    "gpu": "bench.gpu",
}
# These need what not every machine has: a file of prompts, a draft, an accelerator of JAX's.
_ASKED_FOR = (BENCHMARKS["accept"], BENCHMARKS["online"], BENCHMARKS["draft-kernels"])


def main() -> None:
    """Dispatch by name."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a benchmark has started ends with it
    name, *argv = sys.argv[1:] or ["all"]
    if name not in (*BENCHMARKS, "all"):
        sys.exit(f"there is no benchmark {name}; choose among {', '.join(BENCHMARKS)} and all")
    for module in BENCHMARKS.values() if name == "all" else [BENCHMARKS[name]]:
        if name == "all" and (module in _ASKED_FOR or (module == BENCHMARKS["gpu"] and not _has_gpu())):
            continue
        importlib.import_module(module).main(argv)


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


if __name__ == "__main__":
    main()
