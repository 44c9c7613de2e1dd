"""`python -m services.target.model.gguf.convert IN.gguf OUT_FOLDER`: a GGUF file as a folder in the published format.

The folder holds config.json, safetensors weights (bfloat16), tokenizer.json with its chat templates, and
generation_config.json with the end-of-sequence ids. With --describe, a record of the GGUF file (gguf.json) takes the
place of the weights. The folder is valid only after this process has succeeded, so the caller passes a temporary folder
and renames it then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outrider.checkpoints.checkpoint import write_vocabulary
from outrider.checkpoints.conversion import EXIT_DISK_FULL, content_of
from outrider.checkpoints.disk import is_full
from outrider.checkpoints.gguf.record import write_record
from outrider.errors import ConfigError
from services.target.model.gguf.progress import Phases

if TYPE_CHECKING:  # imported when it is known that the file is to be read
    from gguf import GGUFReader

_PHASES = ("reading weights", "loading weights", "writing weights", "building the tokenizer")
_SHARD = "1GB"  # so that large models are written with progress to show


def main(argv: Sequence[str]) -> int:
    """Convert a file. Returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="services.target.model.gguf.convert", description=__doc__)
    parser.add_argument("gguf", type=Path, help="GGUF file")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--describe", action="store_true", help="leave the weights in the file")
    flags = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        (describe if flags.describe else convert)(flags.gguf, flags.folder, console)
    except Exception as error:  # the libraries raise many types for invalid files
        console.print(f"error: {flags.gguf} cannot be converted: {error}", style="red", markup=False)
        return EXIT_DISK_FULL if is_full(error) else 1
    return 0


def convert(gguf: Path, folder: Path, console: Console) -> None:
    """Convert a GGUF file into a folder, and show progress. Raises ConfigError, and errors of the libraries."""
    import torch
    import transformers

    from services.target.model.gguf import metadata as gguf_metadata

    with Phases(gguf.name, _PHASES, console) as phases, _watching(phases.track), _opened(gguf) as (reader, config):
        auto_class: Any = transformers.AutoModelForCausalLM
        model, report = auto_class.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            config=config,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        if report["missing_keys"]:  # these would be initialised randomly
            raise ValueError(f"it lacks tensors that the model needs, such as {min(report['missing_keys'])}")
        if spare := gguf_metadata.unread(reader, model):  # the text would be another without them
            raise ConfigError(
                f"it has tensors that {type(model).__name__} of transformers does not read, such as {spare[0]}; "
                "take the checkpoint as safetensors instead"
            )
        phases.enter(_PHASES[2])
        model.save_pretrained(folder, max_shard_size=_SHARD)
        phases.enter(_PHASES[3])
        _write_tokenizer(reader, gguf, folder, model.config, model.generation_config, console)
    write_vocabulary(folder)
    _give_to_all(folder)


def describe(gguf: Path, folder: Path, console: Console) -> None:
    """Write what `convert` writes, but for the weights, which stay in the file. Raises as `convert` does."""
    from services.target.model.gguf import direct
    from services.target.model.gguf.reader import HeaderReader, record_of

    with Phases(gguf.name, _PHASES[3:], console) as phases:
        phases.enter(_PHASES[3])
        reader = HeaderReader(gguf)
        try:
            warning = direct.describe(reader, folder)
        except direct.Unknown as reason:
            console.print(f"{gguf.name}: described by transformers, because {reason}", markup=False, soft_wrap=True)
            _describe_by_transformers(gguf, folder, console)
        else:
            _warn(gguf, warning, console)
        write_record(folder, record_of(reader, gguf, content_of(gguf)))
    write_vocabulary(folder)
    _give_to_all(folder)


def _describe_by_transformers(gguf: Path, folder: Path, console: Console) -> None:
    import torch
    import transformers

    with _opened(gguf) as (reader, config):
        auto_class: Any = transformers.AutoModelForCausalLM
        config.architectures = [auto_class._model_mapping[type(config)].__name__]
        config.dtype = torch.bfloat16
        folder.mkdir(parents=True)
        config.save_pretrained(folder)
        generation = transformers.GenerationConfig.from_model_config(config)
        _write_tokenizer(reader, gguf, folder, config, generation, console)


def _warn(gguf: Path, warning: str | None, console: Console) -> None:
    if warning:
        console.print(f"warning: {gguf.name}: {warning}", style="yellow", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _opened(gguf: Path) -> Iterator[tuple[GGUFReader, Any]]:
    """The reader of a file, which `transformers` shares inside this context, and the model's configuration."""
    import transformers

    from services.target.model.gguf import metadata as gguf_metadata
    from services.target.model.gguf.reader import HeaderReader, shared

    transformers.utils.logging.set_verbosity_error()
    reader = HeaderReader(gguf)
    with shared(reader):
        config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        gguf_metadata.apply(reader, config)
        yield reader, config


def _write_tokenizer(
    reader: GGUFReader, gguf: Path, folder: Path, config: Any, generation: Any, console: Console
) -> None:
    """Write the tokenizer with its chat templates, and the settings of generation with the end-of-sequence ids."""
    from services.target.model.gguf import direct
    from services.target.model.gguf import metadata as gguf_metadata

    try:
        warning = direct.write_tokenizer(reader, config.model_type, folder)
        own = gguf_metadata.field(reader, "tokenizer.ggml.eos_token_id")
    except direct.Unknown:
        warning, own = _write_tokenizer_by_transformers(reader, gguf, folder)
    _warn(gguf, warning, console)
    generation.eos_token_id = _eos_token_ids(config, own, gguf_metadata.end_token_ids(reader))
    generation.save_pretrained(folder)


def _write_tokenizer_by_transformers(reader: GGUFReader, gguf: Path, folder: Path) -> tuple[str | None, int | None]:
    """Returns a warning for the user, or None, and the tokenizer's end-of-sequence id, or None."""
    import transformers

    from services.target.model.gguf import metadata as gguf_metadata
    from services.target.model.gguf import pretokenizers as gguf_pretokenizers

    whole = gguf_metadata.words_are_whole(reader)
    begin = {"add_bos_token": True} if whole else {}  # the file's own setting takes precedence
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **begin)
    if whole:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    warning = gguf_pretokenizers.apply(reader, tokenizer)
    if templates := gguf_metadata.chat_templates(reader):
        tokenizer.chat_template = templates
    tokenizer.save_pretrained(folder)
    return warning, tokenizer.eos_token_id


def _give_to_all(folder: Path) -> None:
    """Give files the usual permissions: weights are written for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for file in filter(Path.is_file, folder.rglob("*")):
        file.chmod(0o666 & ~mask)


def _eos_token_ids(config: Any, tokenizer: int | None, known: Set[int]) -> list[int]:
    """End-of-sequence ids of the configuration and the tokenizer, and further known ones."""
    configured = config.get_text_config().eos_token_id
    ids = {*(configured if isinstance(configured, list) else [configured]), tokenizer, *known}
    return sorted(token for token in ids if token is not None)


class _watching:  # noqa: N801
    """Inside this context, loops for which `transformers` would show progress bars are tracked.

    The reader of most architectures has its own bar, which the library's hook does not reach.
    """

    def __init__(self, track: Callable[[str, Any], Any]) -> None:
        self._track = track

    def __enter__(self) -> None:
        import transformers
        from transformers import modeling_gguf_pytorch_utils as reader

        self._before = transformers.utils.logging.set_tqdm_hook(self._hook), reader.tqdm
        reader.tqdm = lambda tensors, **_: self._track(_PHASES[0], tensors)

    def __exit__(self, *_: object) -> None:
        import transformers
        from transformers import modeling_gguf_pytorch_utils as reader

        hook, reader.tqdm = self._before
        transformers.utils.logging.set_tqdm_hook(hook)

    def _hook(self, factory: Any, args: Any, kwargs: Any) -> Any:
        phase = {"Loading weights": _PHASES[1], "Writing model shards": _PHASES[2]}.get(kwargs.get("desc", ""))
        return self._track(phase, args[0]) if phase and args else factory(*args, **kwargs | {"disable": True})


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"  # before it is imported: its bars would tear these lines
    sys.exit(main(sys.argv[1:]))
