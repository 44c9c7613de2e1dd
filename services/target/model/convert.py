"""`python -m services.target.model.convert IN.gguf OUT_FOLDER`: a GGUF file as a folder in the published format.

The folder holds config.json, model.safetensors (bfloat16), tokenizer.json with its chat template, and
generation_config.json with the ids that end a text. Building the tokenizer takes most of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_PHASES = ("reading weights", "writing weights", "building the tokenizer")


def main(argv: Sequence[str]) -> int:
    """Convert a file. Returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="services.target.model.convert", description=__doc__)
    parser.add_argument("gguf", type=Path, help="GGUF file")
    parser.add_argument("folder", type=Path, help="folder to write")
    flags = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        convert(flags.gguf, flags.folder, console)
    except Exception as error:  # whatever the libraries below say about a file that is no model
        console.print(f"error: {flags.gguf} cannot be converted: {error}", style="red", markup=False)
        return 1
    return 0


def convert(gguf: Path, folder: Path, console: Console) -> None:
    """Convert a GGUF file into a folder, with a line of progress a phase."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with _phases(gguf.name, console) as next_phase:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        next_phase()
        model.save_pretrained(folder)
        next_phase()
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
    model.generation_config.eos_token_id = _eos_token_ids(model.config, tokenizer)
    model.generation_config.save_pretrained(folder)


def _eos_token_ids(config: Any, tokenizer: Any) -> list[int]:
    """Ids that end a text, by configuration and tokenizer."""
    configured = config.get_text_config().eos_token_id
    ids = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return sorted(token for token in ids if token is not None)


@contextlib.contextmanager
def _phases(name: str, console: Console) -> Iterator[Any]:
    """Shows the phases in turn with the time that each takes; yields a function that goes to the next one."""
    columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        remaining = [progress.add_task(f"{name}: {phase}", start=False, total=1) for phase in _PHASES]
        progress.start_task(remaining[0])

        def next_phase() -> None:
            progress.update(remaining.pop(0), completed=1)
            if remaining:
                progress.start_task(remaining[0])

        yield next_phase
        next_phase()


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"  # before it is imported: its bars would tear these lines
    sys.exit(main(sys.argv[1:]))
