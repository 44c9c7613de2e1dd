"""The target service: verifies proposals with the large model, in PyTorch.

One step of `engine.TargetEngine`, which is the way to read this package:

    scheduler.plan      which sessions, which committed tokens
    tree.select         the best hints of each session that can use them
    batch.build         flat rows, their slots in the paged cache, their tree masks
    runner.forward      a transformers model whose attention is ours (model/attention.py, kernels/)
    drawing.draw        one token after every sampled row: penalties, filters, coupled noise
    verifier.settle     the accepted path, the bonus token, the end of the session
    kv_cache.move       the accepted path's keys and values to where they belong
"""
