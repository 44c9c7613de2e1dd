"""`outrider doctor`: what each service would run on here, why, and what to do about problems.

findings       a finding, and reports as text and JSON
machine        devices, memory, disk, Docker
probes         questions to libraries, in child processes with a time limit
software       versions, device libraries, compiled kernels
services       what `outrider serve` would start with the same flags
report         all of it
shapes, table  the memory plan of published models on GPUs of several sizes
"""
