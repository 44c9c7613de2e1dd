"""`python -m services.target.kernels.cpu`: compiles the kernels, once an environment and source.

For this processor; kinds can be named instead (`avx2 avx512`), for images that other machines run.
"""

from outrider.native import vectors
from services.target.kernels.cpu.build import kernels

if __name__ == "__main__":
    vectors.report(kernels, "CPU kernels of the target", "PyTorch")
