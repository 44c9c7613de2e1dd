"""Worker for `transformers` generate, one prompt after another: MODEL DTYPE THREADS plain|lookup|assisted:FOLDER."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Records the time of the first new token. The first `put` is the prompt."""

    def __init__(self) -> None:
        self._puts, self.first = 0, 0.0

    def put(self, value: Any) -> None:  # noqa: ARG002
        """Receive the prompt, then tokens."""
        self._puts += 1
        if self._puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Receive the end of the text."""


class Model:
    """A loaded model. mode: plain, lookup, or assisted:FOLDER of a draft model."""

    def __init__(self, folder: str, dtype: str, mode: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        load = {"dtype": getattr(torch, dtype)}
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, **load).eval()
        self._options: dict[str, Any] = {"do_sample": False, "pad_token_id": self._tokenizer.eos_token_id}
        if mode == "lookup":
            self._options["prompt_lookup_num_tokens"] = 8
        elif mode != "plain":
            draft: Any = AutoModelForCausalLM.from_pretrained(mode.partition(":")[2], **load)
            self._options["assistant_model"] = draft.eval()

    @torch.inference_mode()
    def answer(self, text: str, new: int) -> dict[str, Any]:
        """A greedy answer to one prompt."""
        inputs = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        clock, start = Clock(), time.perf_counter()
        output = self._model.generate(**inputs, max_new_tokens=new, streamer=clock, **self._options)
        seconds = time.perf_counter() - start
        ids = output[0, inputs["input_ids"].shape[1] :]
        answer = self._tokenizer.decode(ids, skip_special_tokens=True)
        return {"text": answer, "tokens": len(ids), "first": clock.first - start, "seconds": seconds}


def main(folder: str, dtype: str, threads: str, mode: str) -> None:
    """Load the model and answer requests from stdin."""
    torch.set_num_threads(int(threads))
    model = Model(folder, dtype, mode)
    model.answer("Hello", 4)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        replies = [model.answer(text, request["new"]) for text in request["texts"]]
        print(json.dumps({"seconds": time.perf_counter() - start, "replies": replies}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
