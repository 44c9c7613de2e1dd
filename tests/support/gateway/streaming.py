"""A gateway process with its services, and streamed answers of it."""

import contextlib
import json
import os
import threading

from tests.support.gateway.engines import expected, tokenizer
from tests.support.gateway.services import Draft, Gateway, Service, Target, until

TOKENIZER = tokenizer()
COUNT = 200  # tokens of a streamed answer
PROMPT = TOKENIZER.encode("A").ids
ANSWER = expected(PROMPT, COUNT)


class Stream(threading.Thread):
    """A streamed completion in a thread; collects token ids, text, log-probabilities and the end."""

    def __init__(self, gateway, **options):
        super().__init__()
        self.gateway, self.tokens, self.text, self.reason, self.error = gateway, [], "", None, None
        self.logprobs = []
        self.body = {
            "prompt": PROMPT, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "stream": True,
            "return_token_ids": True, **options,
        }  # fmt: skip
        self.start()

    def run(self):
        with self.gateway.client.stream("POST", "/v1/completions", json=self.body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.add(json.loads(line.removeprefix("data: ")))

    def add(self, chunk):
        self.error = chunk.get("error", self.error)
        for choice in chunk.get("choices", []):
            self.tokens += choice.get("token_ids") or []
            self.text += choice["text"]
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.reason = choice["finish_reason"] or self.reason

    def whole(self):
        """Wait for the end. True if the answer is the expected one."""
        self.join(40)
        assert not self.is_alive()
        assert self.error is None
        return self.tokens == ANSWER and self.text == TOKENIZER.decode(ANSWER) and self.reason == "length"


def started(stream):
    """Wait until a stream has received some tokens."""
    until(lambda: len(stream.tokens) > 10)


@contextlib.contextmanager
def system(folder, targets=1, drafts=1, delay=0.03, **flags):
    """Services slow enough that streams outlast a restart, and a gateway of their own: (gateway, targets, drafts)."""
    services = [
        [Service(kind, f"unix:{folder}/{kind.__name__}{i}-{os.urandom(3).hex()}", delay=pause) for i in range(count)]
        for kind, count, pause in ((Target, targets, delay), (Draft, drafts, 0))
    ]
    for service in [*services[0], *services[1]]:
        service.start()
    gateway = Gateway(folder, *([service.address for service in group] for group in services), **flags)
    try:
        gateway.wait()
        for kind, group in zip(("target", "draft"), services, strict=True):
            until(lambda kind=kind, group=group: gateway.metric("outrider_service_up", service=kind) == len(group))
        yield gateway, *services
        until(lambda: not any(s.sessions for group in services for s in group if s.running))
    finally:
        assert gateway.stop() == 0
        for service in [*services[0], *services[1]]:
            service.stop()
