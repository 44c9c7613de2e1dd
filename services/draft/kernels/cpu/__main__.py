"""`python -m services.draft.kernels.cpu`: compiles the kernels once for an environment.

By default for this processor; kinds can be named instead (`avx2 avx512`), for images that other machines run.
"""

from outrider.native import vectors
from services.draft.kernels.cpu.build import kernels

if __name__ == "__main__":
    vectors.report(kernels, "CPU kernels of the draft", "plain JAX")
