"""The usual dense decoders on a CPU, read without `transformers`, whose import takes longer than the rest of a start.

    config    config.json of Llama, Mistral, Qwen2 and Qwen3, or the reason why `transformers` must read it
    modules   the layers, by the names that checkpoints have for them; they hold weights and compute nothing
    load      a folder becomes a `Model` that runs as a compiled program

Everything else is loaded by `services.target.model.loading`, with the same result. What is not as expected here is left
to `transformers`, which has the messages.
"""
