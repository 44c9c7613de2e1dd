"""`python -m services.draft.kernels.cpu [all | KIND...]`: compiles the kernels once for an environment.

By default for this processor. For images that other machines run: all kinds of its architecture, or some by name.
"""

from outrider.native import vectors
from services.draft.kernels.cpu.build import kernels

if __name__ == "__main__":
    vectors.report(kernels, "CPU kernels of the draft", "plain JAX")
