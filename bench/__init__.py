"""Benchmarks of Outrider, run by `outrider bench NAME`.

A benchmark measures a system and its baseline in the same call, alternately, and reports the speedup over the named
baseline together with the floor: the time that reading the weights and the KV cache alone takes.
"""
