"""Gateways with flags, and requests that last."""

from contextlib import contextmanager

from tests.support.gateway.engines import tokenizer
from tests.support.gateway.services import Gateway

A = tokenizer().encode("A").ids


LONG = {"prompt": "A", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@contextmanager
def gateway_with(folder, target, draft, **flags):
    process = Gateway(folder, [target.address], [draft.address], **flags).wait()
    try:
        yield process
    finally:
        assert process.stop() == 0


@contextmanager
def slow(target, delay):
    target.engine.delay = delay
    try:
        yield
    finally:
        target.engine.delay = target.delay
