"""Prints the requirements of the project's extras, one a line. An image's layer of dependencies thus depends only on
pyproject.toml, so that a change of the code does not reinstall them.

Usage: python3 requirements.py EXTRA... < pyproject.toml
"""

import sys
import tomllib

project = tomllib.load(sys.stdin.buffer)["project"]
wanted = [need for extra in sys.argv[1:] for need in project["optional-dependencies"][extra]]
sys.stdout.write("\n".join(project["dependencies"] + wanted) + "\n")
