"""Which clients there are, and the virtual environment of each, made when it is first needed.

They stay out of the project's own environment: what they ask for must not change what is tested and served.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "conformance"
SCRIPTS = Path(__file__).parent / "clients"


@dataclass(frozen=True)
class Client:
    """A client. package: whose version is told. requirements: of its environment. script: what drives it."""

    name: str
    package: str
    requirements: tuple[str, ...]
    script: str

    @property
    def folder(self) -> Path:
        """Its environment."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    def install(self) -> None:
        """Make the environment, unless it is there. Raises CalledProcessError."""
        stamp, wanted = self.folder / ".installed", "\n".join(sorted(self.requirements)) + "\n"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"{self.name}: installing {', '.join(self.requirements)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True)
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.requirements]
        subprocess.run(pip, check=True)
        stamp.write_text(wanted)

    def version(self) -> str:
        """Of the package."""
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


CLIENTS = (
    Client("openai", "openai", ("openai>=3,<4",), "sdk.py"),
    Client("litellm", "litellm", ("litellm>=1.100,<2",), "lite.py"),
    Client("langchain", "langchain-openai", ("langchain-openai>=1.4,<2",), "chain.py"),
    Client("instructor", "instructor", ("instructor>=1.17,<2",), "instruct.py"),
    Client("llm", "llm", ("llm>=0.32,<0.40",), "commands.py"),
    Client("schemathesis", "schemathesis", ("schemathesis>=4.30,<5",), "schemas.py"),
    Client("lm-eval", "lm-eval", ("lm-eval[api]>=0.4.13,<0.5", "transformers>=5,<6"), "evaluate.py"),
)
