"""`python -m bench [NAME] [flags]`: runs one benchmark, or all of them; results go to docs/benchmarks/."""

from __future__ import annotations

import importlib
import shutil
import sys

BENCHMARKS = {
    "streams": "bench.streams.run",
    "system": "bench.system",
    "target": "bench.target",
    "draft": "bench.draft",
    "quality": "bench.quality",
    "deterministic": "bench.deterministic",
    "gpu": "bench.gpu",
}


def main() -> None:
    """Dispatch by name."""
    name, *argv = sys.argv[1:] or ["all"]
    if name not in (*BENCHMARKS, "all"):
        sys.exit(f"there is no benchmark {name}; choose among {', '.join(BENCHMARKS)} and all")
    for module in BENCHMARKS.values() if name == "all" else [BENCHMARKS[name]]:
        if name == "all" and module == BENCHMARKS["gpu"] and shutil.which("nvidia-smi") is None:
            continue
        importlib.import_module(module).main(argv)


if __name__ == "__main__":
    main()
