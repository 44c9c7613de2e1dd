"""Worker for OpenVINO GenAI: MODEL THREADS plain|lookup. Plain decoding batches concurrent prompts continuously."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openvino_genai as ov


class Model:
    """A loaded model. mode: plain, or lookup for prompt lookup."""

    def __init__(self, folder: str, threads: int, mode: str) -> None:
        scheduler = ov.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.cache_size = 8, 1
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        self._lookup = mode == "lookup"
        if self._lookup:
            options |= {"prompt_lookup": True, "scheduler_config": scheduler}
        self._single = ov.LLMPipeline(folder, "CPU", **options)
        self._batched = None if self._lookup else ov.ContinuousBatchingPipeline(folder, scheduler, "CPU", options)
        self._tokenizer = self._single.get_tokenizer()

    def _config(self, new: int) -> Any:
        config = ov.GenerationConfig()
        config.max_new_tokens, config.do_sample = new, False
        config.apply_chat_template = False
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = 8, 3
        return config

    def _prompt(self, text: str) -> str:
        turns = [{"role": "user", "content": text}]
        return str(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True))

    def answer(self, text: str, new: int) -> dict[str, Any]:
        """A greedy answer to one prompt."""
        times: list[float] = []

        def piece(_: str) -> Any:
            times.append(time.perf_counter())
            return ov.StreamingStatus.RUNNING

        start = time.perf_counter()
        result = self._single.generate([self._prompt(text)], self._config(new), streamer=piece)
        seconds = time.perf_counter() - start
        tokens = result.perf_metrics.get_num_generated_tokens()
        return {"text": result.texts[0], "tokens": tokens, "first": times[0] - start, "seconds": seconds}

    def answers(self, texts: list[str], new: int) -> list[dict[str, Any]]:
        """Greedy answers to all prompts, in one batch; one after another with lookup."""
        if len(texts) == 1 or self._batched is None:
            return [self.answer(text, new) for text in texts]
        start = time.perf_counter()
        results = self._batched.generate([self._prompt(text) for text in texts], [self._config(new)] * len(texts))
        seconds = time.perf_counter() - start
        answers = [result.m_generation_ids[0] for result in results]
        counts = [int(self._tokenizer.encode(text).input_ids.shape[1]) for text in answers]
        pairs = zip(answers, counts, strict=True)
        return [{"text": text, "tokens": count, "first": 0.0, "seconds": seconds} for text, count in pairs]


def main(folder: str, threads: str, mode: str) -> None:
    """Load the model and answer requests from stdin."""
    model = Model(folder, int(threads), mode)
    model.answer("Hello", 4)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        replies = model.answers(request["texts"], request["new"])
        print(json.dumps({"seconds": time.perf_counter() - start, "replies": replies}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
