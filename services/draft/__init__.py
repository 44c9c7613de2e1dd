"""The draft service (JAX): proposes draft tokens ahead of the target.

process     the process: flags, construction of drafters, the gRPC service
engine      the engine: grows the draft trees of all sessions and sends proposals
drafters    algorithms that expand nodes: n-grams, decoders, feature-based heads; a new drafter goes here
sessions    a session: draft tree, frontiers, prefix KV, features, step inputs
ngrams      stored n-grams, compiled in C++ with a plain twin
model       the draft model in JAX: layers, matrices, weights, tensor parallelism, compiled programs
formats     published checkpoints; a new checkpoint format goes here
kernels     attention and CPU kernels; a new kernel goes here
learning    training of draft models: batches, objective, optimizer; a new training algorithm goes to its algorithms
online      training on the traffic that is served (`--online`)
train       `outrider train`: collection of answers, training, evaluation
"""
