"""Products in Gluon, compiled for a GPU that is not there: they cannot be interpreted; tests/gpu runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PROCESSOR = 227 << 10  # bytes of shared memory, of compute capability 9.0

# Compiles every kernel with the rings of its launches and prints properties of each.
COMPILE = r"""
import itertools, json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from services.target.kernels.cuda import small_batch_matmul_gluon as gluon

POINTERS = {
    "positions": "i64", "slots": "i64", "cosines": "fp32", "sines": "fp32", "k_pool": "fp8e4nv", "v_pool": "fp8e4nv",
}
NUMBERS = ("rows", "outputs", "inputs", "x_row", "w_row", "y_row", "q_row", "k_page", "k_slot", "v_page", "v_slot")

def compiled(kernel, ring, **constants):
    constants |= {"ROWS": 16, **ring.constants}
    warps = constants.pop("num_warps")
    names = kernel.arg_names
    kinds = {
        name: "constexpr" if name in constants else "i32" if name in NUMBERS else "*" + POINTERS.get(name, "bf16")
        for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name not in {*constants, "rows"}
    }
    source = GluonASTSource(kernel, kinds, {(names.index(name),): value for name, value in constants.items()}, aligned)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "launch_pdl": True})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used = subprocess.run([sys.argv[1], "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    before, behind = made.asm["ptx"].split("griddepcontrol.wait", 1)
    return {
        "shared": made.metadata.shared, "stack": int(re.search(r"STACK:(\d+)", used)[1]), "stages": ring.stages,
        "copies": before.count("cp.async.cg.shared.global"), "loads": before.count("ld.global"),
        "block": constants.get("OUTPUTS", 32) * ring.inputs * 2 // (16 * 32 * warps),
    }

results = {}
for bias, gelu in itertools.product((False, True), repeat=2):
    plain = {"BIAS": bias, "GATED": False, "GELU": False}
    results[f"many {bias}"] = compiled(gluon.small_batch_linear, gluon.MANY, OUTPUTS=32, **plain)
    results[f"alone {bias}"] = compiled(gluon.small_batch_linear, gluon.ALONE, OUTPUTS=32, **plain)
    results[f"gated {gelu}"] = compiled(
        gluon.small_batch_linear, gluon.GATED, OUTPUTS=64, BIAS=False, GATED=True, GELU=gelu
    )
    results[f"turned {bias}"] = compiled(
        gluon.small_batch_rotary, gluon.TURNED, HEADS=32, KV_HEADS=8, D=128, HALF=64, PAGE=16, LIMIT=448.0, PAIRS=16,
        BIAS=bias,
    )
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def kernels():
    if not (TOOLS / "cuobjdump").exists():
        pytest.skip("Triton has come without the compiler for GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, str(TOOLS / "cuobjdump")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_first_blocks_are_asked_for_before_the_wait(kernels):
    assert len(kernels) == 8
    for name, kernel in kernels.items():
        assert kernel["copies"] == (kernel["stages"] - 1) * kernel["block"], name
        assert (kernel["loads"] > 0) == name.startswith("turned"), name  # positions, and what is looked up by them


def test_nothing_is_kept_outside_registers(kernels):
    assert {name: kernel["stack"] for name, kernel in kernels.items()} == dict.fromkeys(kernels, 0)


def test_processors_have_room_for_two_programs_of_a_launch_but_for_those_that_want_to_be_alone(kernels):
    for name, kernel in kernels.items():
        assert (2 * (kernel["shared"] + 1024) > PROCESSOR) == name.startswith("alone"), name
