"""`python -m services.target.kernels.cpu [all | KIND...]`: compiles the kernels, once per environment and source.

By default for this processor. For images that other machines run: all kinds of its architecture, or some by name.
"""

from outrider.native import vectors
from services.target.kernels.cpu.build import kernels

if __name__ == "__main__":
    vectors.report(kernels, "CPU kernels of the target", "PyTorch")
