"""Send a question to a running gateway over gRPC, print the text as it arrives, then the accept length.

python docs/examples/generate.py "Why is the sky blue?" [host:port]
"""

# ruff: noqa: T201

from __future__ import annotations

import sys

from outrider.client import Client


def main(question: str, address: str = "127.0.0.1:30001") -> None:
    """Print the answer to a question."""
    with Client(address) as client:
        print(f"[{client.info().served_model_name}]")
        parts = client.generate([{"role": "user", "content": question}], max_tokens=200, temperature=0.7, seed=1)
        for part in parts:
            print(part.text, end="", flush=True)
    steps, tokens = part.speculation.steps, part.completion_tokens
    print(f"\n[{part.finish_reason}: {tokens} tokens in {steps} steps, {tokens / steps:.2f} a step, seed {part.seed}]")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
