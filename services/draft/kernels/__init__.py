"""Kernels of the draft model. All attention kernels have the plain twin in jax.numpy, which runs on every device.

A new attention kernel is a module here, entered in services/draft/model/layers/backend.py.
"""
