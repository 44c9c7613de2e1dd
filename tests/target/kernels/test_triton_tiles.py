"""Tiles of attention, compiled for GPUs that are not there: the smallest of them have room."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
ROOM = 99 << 10  # bytes of shared memory that a program may have, of compute capabilities 8.6, 8.9 and 12.0

COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from services.target.kernels.cuda.attention import pick_tile
from services.target.kernels.cuda.attention_kernels import attend

OTHERS = {"out": None, "sinks": None, "q": None, "k_pool": None, "v_pool": None, "positions": "i64"} | dict.fromkeys(
    ("tiles", "items", "item_count", "pages", "words", "paths"), "i32") | dict.fromkeys(
    ("partial_acc", "partial_ml"), "fp32")

def room(kind, first, rest, value_dim):
    tile = pick_tile(first + rest, value_dim, 4 if kind == "fp32" else 2)
    constants = dict(KV_HEADS=1, GROUP=16, HEADS=16, BLOCKS=1, D1=first, D2=rest, D=first + rest, DV=value_dim,
        DV_PAD=value_dim, PAGE=16, M=tile.lanes, N=tile.keys, TREE=True, WINDOW=False, SOFTCAP=False, SINKS=False,
        WIDE=False, ORDERED=False, EACH=False, CHAINED=False)
    names = attend.arg_names
    kinds = {name: "constexpr" if name in constants else "*" + (OTHERS[name] or kind) if name in OTHERS else
             "fp32" if name in ("scale", "softcap", "v_scale") else "i32" for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names)
               if kinds[name] not in ("constexpr", "fp32") and name not in ("window", "words_a_node")}
    source = ASTSource(attend, kinds, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return compile(source, GPUTarget("cuda", 86, 32), options).metadata.shared

print(json.dumps([room(*tile) for tile in json.loads(sys.argv[1])]))
"""
TILES = [(kind, *dims) for kind in ("fp32", "bf16") for dims in ((256, 0, 256), (512, 64, 512))]


def test_small_gpus_have_room_for_the_largest_tiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, json.dumps(TILES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used = dict(zip(TILES, json.loads(done.stdout), strict=True))
    assert {tile: room for tile, room in used.items() if not 0 < room <= ROOM} == {}
