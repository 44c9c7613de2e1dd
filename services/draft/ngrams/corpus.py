"""A corpus of texts that NGRAM copies from, read at the start-up: --speculative-ngram-external-corpus-path.

    *.jsonl       one document a line: {"text": ...}, {"content": ...} or a string
    other files   one text
    a folder      all files below it, by name

Documents are tokenized with the target's tokenizer, and their n-grams are kept in a store of their own, to which
sessions add nothing. No path crosses from one document into the next. The store has the capacity of the sessions'
store, so that memory is bounded: of a larger corpus the paths stored last are kept.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError
from services.draft.ngrams.base import Ngrams

log = logging.getLogger(__name__)

_FLAG = "--speculative-ngram-external-corpus-path"
_BATCH = 64  # documents that are tokenized at a time
_PART = 1 << 18  # characters of a long text that are tokenized at a time, up to a line break
_LOG_INTERVAL = 5.0  # seconds between two lines of progress


def files_of(path: Path) -> list[Path]:
    """The files of a corpus. Raises ConfigError without any."""
    found = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    if not found or not all(file.is_file() for file in found):
        raise ConfigError(f"{_FLAG}: there is no text at {path}; name a file or a folder of files")
    return found


def documents(path: Path) -> Iterator[str]:
    """The documents of a corpus, one after another. Raises ConfigError for a file that cannot be read."""
    for file in files_of(path):
        try:
            if file.suffix == ".jsonl":
                with file.open(encoding="utf-8") as lines:
                    yield from (_document(file, i, line) for i, line in enumerate(lines, 1) if line.strip())
            else:
                with file.open(encoding="utf-8") as lines:
                    while part := lines.readlines(_PART):
                        yield "".join(part)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{_FLAG}: {file} cannot be read as text: {error}") from None


def _document(file: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{_FLAG}: line {number} of {file} is not JSON: {error}") from None
    text = row if isinstance(row, str) else row.get("text", row.get("content")) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{_FLAG}: line {number} of {file} is not a document; write {{"text": "..."}}')
    return text


def read_corpus(path: Path, tokenizer_folder: Path, store: Ngrams, capacity: int, max_tokens: int) -> int:
    """Store a corpus. Returns its number of tokens. Raises ConfigError for unreadable files, and for too many tokens.

    tokenizer_folder: the target's. capacity: of the store, in nodes. max_tokens: largest corpus.
    """
    from tokenizers import Tokenizer

    file = tokenizer_folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{_FLAG} needs the target's tokenizer.json, and {tokenizer_folder} has none")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # some tokenizer files enable both
    tokenizer.no_padding()
    start = last_line = time.monotonic()
    total, count = 0, 0
    texts = documents(path)
    while batch := list(islice(texts, _BATCH)):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            total += len(encoding.ids)
            if total > max_tokens:
                raise ConfigError(
                    f"{_FLAG}: {path} has more than {max_tokens:,} tokens; leave some of it out, or raise "
                    "--speculative-ngram-external-corpus-max-tokens"
                )
            store.insert(np.array(encoding.ids, np.uint32))
        count += len(batch)
        if time.monotonic() - last_line > _LOG_INTERVAL:
            last_line = time.monotonic()
            log.info("corpus: %d documents, %d tokens so far", count, total)
    log.info("corpus: %d documents, %d tokens, %d nodes, read in %.1f s",
             count, total, len(store), time.monotonic() - start)  # fmt: skip
    if len(store) >= capacity:
        log.warning("the corpus exceeds %d nodes; the n-grams that were read last are kept", capacity)
    return total
