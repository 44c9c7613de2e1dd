"""Sampling parameters that exercise every filter and extreme temperatures."""

from outrider.speculation.sampling import SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=2**64 - 1),
    SamplingParams(temperature=0.01, seed=3),
    SamplingParams(temperature=50.0, seed=3),
    SamplingParams(temperature=0.7, top_k=5, seed=1),
    SamplingParams(temperature=0.7, top_k=1, seed=1),
    SamplingParams(temperature=1.3, top_k=10**6, seed=1),
    SamplingParams(temperature=1.3, top_p=0.9, seed=1),
    SamplingParams(temperature=20.0, top_p=0.99, seed=1),
    SamplingParams(temperature=0.9, min_p=0.1, seed=9),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02, seed=9),
    SamplingParams(temperature=1.0, top_p=1e-9, seed=9),
]
