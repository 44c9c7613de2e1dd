"""`make fuzz`: coverage-guided fuzzers of everything that reads bytes of others, and the inputs that they found.

A target in `targets/` takes bytes and raises for a fault. `python -m tests.fuzz` lets atheris (libFuzzer) look for such
bytes; `test_corpora.py` replays the inputs kept in `corpus/`, without atheris.
"""
