"""Requests for generations."""

from gateway.sessions.request import GenerationRequest, StopOptions
from outrider.speculation.sampling import SamplingParams


def request_for(prompt, max_tokens, *, sampling=None, **options):
    """A resolved request. options: further fields of GenerationRequest."""
    return GenerationRequest(prompt, sampling or SamplingParams(), StopOptions(max_tokens), **options)
