"""Greedy `transformers` generate over prompts on stdin; prints seconds and new tokens as JSON.

`python -m bench.end_to_end.plain_transformers MODEL DTYPE MAX_TOKENS < prompts.json`
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Load, warm up, generate one prompt at a time."""
    folder, dtype, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in json.load(sys.stdin)
    ]
    inputs = [tokenizer(text, return_tensors="pt", add_special_tokens=False) for text in texts]
    options = {"do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    model.generate(**inputs[0], max_new_tokens=4, **options)
    tokens, start = 0, time.perf_counter()
    for one in inputs:
        output = model.generate(**one, max_new_tokens=limit, **options)
        tokens += output.shape[1] - one["input_ids"].shape[1]
    print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}))


if __name__ == "__main__":
    main()
