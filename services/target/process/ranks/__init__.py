"""Tensor-parallel ranks of the target: one process each, on one machine or several.

rank 0      engine -> LeadingRunner.forward -> broadcasts the batch -> its part of the pass -> logits -> samples
others                run_worker            <- receive it           -> their parts, keys and values of their heads
"""
