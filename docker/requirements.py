"""Prints what extras of the project need, one requirement a line. So an image's layer of dependencies depends on
pyproject.toml alone, and a change of the code does not install them anew.

Usage: python3 requirements.py EXTRA... < pyproject.toml
"""

import sys
import tomllib

project = tomllib.load(sys.stdin.buffer)["project"]
wanted = [need for extra in sys.argv[1:] for need in project["optional-dependencies"][extra]]
sys.stdout.write("\n".join(project["dependencies"] + wanted) + "\n")
