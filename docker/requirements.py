"""Prints the requirements of the project's extras, one a line. An image's layer of dependencies thus depends only on
pyproject.toml, so that a change of the code does not reinstall them.

Usage: python3 requirements.py [--accelerator cuda13] EXTRA... < pyproject.toml

With an accelerator, the extras that are named for it (draft-cuda13) come along with their own (draft).
"""

import argparse
import sys
import tomllib

parser = argparse.ArgumentParser()
parser.add_argument("--accelerator", choices=("cpu", "cuda12", "cuda13", "tpu"), default="cpu")
parser.add_argument("extras", nargs="+")
args = parser.parse_args()
project = tomllib.load(sys.stdin.buffer)["project"]
found = project["optional-dependencies"]
names = [*args.extras, *(name for extra in args.extras if (name := f"{extra}-{args.accelerator}") in found)]
wanted = [need for name in names for need in found[name]]
sys.stdout.write("\n".join(project["dependencies"] + wanted) + "\n")
