"""`transformers` generate, one prompt after another: MODEL DTYPE THREADS plain|lookup|assisted:FOLDER."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Notes when the first new token comes; the prompt is put first."""

    def __init__(self) -> None:
        self._puts, self.first = 0, 0.0

    def put(self, value: Any) -> None:  # noqa: ARG002
        """Something has come."""
        self._puts += 1
        if self._puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing more comes."""


class Model:
    """A model that answers."""

    def __init__(self, folder: str, dtype: str, mode: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        load = {"dtype": getattr(torch, dtype)}
        self._model = AutoModelForCausalLM.from_pretrained(folder, **load).eval()
        self._options: dict[str, Any] = {"do_sample": False, "pad_token_id": self._tokenizer.eos_token_id}
        if mode == "lookup":
            self._options["prompt_lookup_num_tokens"] = 8
        elif mode != "plain":
            draft = AutoModelForCausalLM.from_pretrained(mode.partition(":")[2], **load)
            self._options["assistant_model"] = draft.eval()

    @torch.inference_mode()
    def answer(self, text: str, new: int) -> dict[str, Any]:
        """A greedy answer."""
        inputs = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        clock, start = Clock(), time.perf_counter()
        output = self._model.generate(**inputs, max_new_tokens=new, streamer=clock, **self._options)
        seconds = time.perf_counter() - start
        ids = output[0, inputs["input_ids"].shape[1] :]
        said = self._tokenizer.decode(ids, skip_special_tokens=True)
        return {"text": said, "tokens": len(ids), "first": clock.first - start, "seconds": seconds}


def main(folder: str, dtype: str, threads: str, mode: str) -> None:
    """Answer what comes in."""
    torch.set_num_threads(int(threads))
    model = Model(folder, dtype, mode)
    model.answer("Hello", 4)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        replies = [model.answer(text, asked["new"]) for text in asked["texts"]]
        print(json.dumps({"seconds": time.perf_counter() - start, "replies": replies}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
