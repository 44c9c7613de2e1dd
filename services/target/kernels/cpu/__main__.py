"""`python -m services.target.kernels.cpu [avx2] [avx512]`: compiles the kernels, once per environment and source.

By default for this processor; for images that other machines run, name the instruction sets.
"""

from outrider.native import vectors
from services.target.kernels.cpu.build import kernels

if __name__ == "__main__":
    vectors.report(kernels, "CPU kernels of the target", "PyTorch")
