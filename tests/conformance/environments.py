"""The clients, and the environment of each, created when it is first needed.

They stay out of the project's own environment, so that their requirements cannot change it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "conformance"
SCRIPTS = Path(__file__).parent / "clients"


@dataclass(frozen=True)
class Client(ABC):
    """A client. package: its version is reported. requirements: of its environment. script: runs the checks."""

    name: str
    package: str
    requirements: tuple[str, ...]
    script: str

    @property
    def folder(self) -> Path:
        """Folder of the environment."""
        return FOLDER / self.name

    @property
    @abstractmethod
    def commands(self) -> Path:
        """The folder with the commands of its environment."""

    @property
    @abstractmethod
    def interpreter(self) -> str:
        """Interpreter of the script."""

    @property
    def lacking(self) -> str:
        """Program that this machine lacks; empty if none."""
        return ""

    @abstractmethod
    def version(self) -> str:
        """Version of the package. Raises CalledProcessError."""

    def install(self) -> None:
        """Make the environment, unless it is there. Raises CalledProcessError."""
        stamp, wanted = self.folder / ".installed", "\n".join(sorted(self.requirements)) + "\n"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"{self.name}: installing {', '.join(self.requirements)}", flush=True)
        self._make()
        stamp.write_text(wanted)

    @abstractmethod
    def _make(self) -> None:
        """Make the environment anew. Raises CalledProcessError."""


class PythonClient(Client):
    """A client in a virtual environment."""

    @property
    def commands(self) -> Path:
        """The folder with the commands of its environment."""
        return self.folder / "bin"

    @property
    def interpreter(self) -> str:
        """Its own Python."""
        return str(self.commands / "python")

    def version(self) -> str:
        """Version of the package. Raises CalledProcessError."""
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return _output(self.interpreter, "-c", code)

    def _make(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True)
        pip = [self.interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *self.requirements], check=True)


class NodeClient(Client):
    """One in a folder of Node packages; it needs `node` and `npm`."""

    @property
    def commands(self) -> Path:
        """The folder with the commands of its environment."""
        return self.folder / "node_modules" / ".bin"

    @property
    def interpreter(self) -> str:
        """Node, for scripts that are its own; others ask for nothing but a Python."""
        return "node" if self.script.endswith(".mjs") else sys.executable

    @property
    def lacking(self) -> str:
        """Program that this machine lacks; empty if none."""
        return " or ".join(command for command in ("node", "npm") if shutil.which(command) is None)

    def version(self) -> str:
        """Version of the package. Raises CalledProcessError."""
        package = json.loads((self.folder / "node_modules" / self.package / "package.json").read_text())
        return str(package["version"])

    def _make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        # Without a package.json of its own, npm would look for one in the folders above.
        (self.folder / "package.json").write_text('{"private": true}\n')
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"]
        subprocess.run([*npm, *self.requirements], check=True, cwd=self.folder)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


CLIENTS = (
    PythonClient("openai", "openai", ("openai>=3,<4",), "sdk.py"),
    NodeClient("openai-node", "openai", ("openai@^7.57",), "sdk.mjs"),
    PythonClient("litellm", "litellm", ("litellm>=1.100,<2",), "lite.py"),
    PythonClient("langchain", "langchain-openai", ("langchain-openai>=1.4,<2",), "chain.py"),
    PythonClient("instructor", "instructor", ("instructor>=1.17,<2",), "instruct.py"),
    PythonClient("llm", "llm", ("llm>=0.32,<0.40",), "commands.py"),
    PythonClient("schemathesis", "schemathesis", ("schemathesis>=4.30,<5",), "schemas.py"),
    PythonClient("lm-eval", "lm-eval", ("lm-eval[api]>=0.4.13,<0.5", "transformers>=5,<6"), "evaluate.py"),
    PythonClient("aiperf", "aiperf", ("aiperf>=0.13,<0.14",), "load.py"),
    PythonClient("smg", "smg", ("smg>=1.13,<2",), "route.py"),
    PythonClient("sglang-router", "sglang-router", ("sglang-router>=0.3.2,<0.4",), "rollouts.py"),
    NodeClient("buf", "@bufbuild/buf", ("@bufbuild/buf@^1.75",), "reflect.py"),
)
