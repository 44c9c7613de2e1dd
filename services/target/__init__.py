"""The target service (PyTorch): verifies draft tokens with the large model.

One step, as `engine.engine.TargetEngine` takes it, is the way to read this package:

    scheduler.plan               which sessions take part, with which committed tokens (outrider/serving)
    speculation.controller.plan  which draft tokens are verified, or what is computed instead of one step
    step.batch.build             flat tokens, their slots in the paged cache, the tree mask
    model runner.forward         a transformers model with our attention; kernels apply the tree mask
    sampling                     one sample after every root and draft token: penalties, filters, coupled noise
    engine.settlement.settle     the accepted path, the bonus token, the end of a session
    kv_cache.move                the accepted path's keys and values move to their committed slots

process      the process: flags, gRPC service, control of a running engine, warm-up, tensor-parallel ranks
engine       the step loop, the open sessions, settlement
speculation  draft sources, cost model, verification budget, modes; a new draft source goes to its sources
sampling     what a session asked for; sampling on the device, penalties, log-probabilities, masks
features     hidden states for feature-based drafters
model        loading and running models; GGUF, deterministic and CUDA parts in packages of their own
kernels      attention, products, sampling and cache kernels with their plain twins; a new kernel goes here
grammar      schemas and GBNF for llguidance
step         a step's batch, its layout and its transfers
"""
