"""Sampling: from a step's logits to its tokens, with penalties, grammar masks, bans and log-probabilities.

`step_sampler` is the entry: it lays out the sessions' parameters (`row_params`, `penalties`, `masks`) and samples with
`sampler` or the compiled kernel; `samples` holds the results, `compaction` moves the cache rows of accepted paths.
"""
