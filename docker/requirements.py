"""Prints what an extra of the project needs, one requirement a line. So an image's layer of dependencies depends on
pyproject.toml alone, and a change of the code does not install them anew.

Usage: python3 requirements.py EXTRA < pyproject.toml
"""

import sys
import tomllib

project = tomllib.load(sys.stdin.buffer)["project"]
sys.stdout.write("\n".join(project["dependencies"] + project["optional-dependencies"][sys.argv[1]]) + "\n")
