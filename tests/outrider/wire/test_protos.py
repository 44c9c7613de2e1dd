"""The stubs are generated from the protos, and the protos keep their rules."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def test_stubs_are_fresh(tmp_path):
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([*command, *outputs, *map(str, PROTOS)], check=True)
    made = {file.relative_to(tmp_path): file for file in tmp_path.rglob("*.py*")}
    assert len(made) == 3 * len(PROTOS)
    stale = [str(name) for name, file in made.items() if file.read_text() != (ROOT / name).read_text()]
    assert stale == [], "run `make protos`"


def test_every_field_and_value_is_explained():
    silent = []
    for file in PROTOS:
        lines = file.read_text().splitlines()
        for i, line in enumerate(lines):
            is_field = re.match(r"\s+(optional |repeated )?[\w.]+ \w+ = \d+;|\s+[A-Z_]+ = \d+;", line)
            if is_field and not re.match(r"\s+// .*", lines[i - 1]):
                silent.append(f"{file.name}:{i + 1}: {line.strip()}")
    assert silent == []
