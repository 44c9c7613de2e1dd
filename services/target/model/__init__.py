"""The model: loaded by `transformers`, run with our attention over the paged cache.

loading         from a checkpoint's folder to a `base.Model`. A new quantized checkpoint format goes into
                `loading/quantized.py` (its table of formats) and outrider/checkpoints/dequantize.py
modules         runs any causal LM of `transformers`, module by module (`attention`, `latent`, `linear`, `capture`)
native          runs dense decoders (`decoder`) as compiled programs on CPUs (`program_builder`, `eagle_head`)
cuda            runs dense decoders in few launches on CUDA; CUDA graphs; torch.compile
deterministic   batch-invariant operators
gguf            conversion of GGUF files
weight_slots    the place of each checkpoint tensor in a loaded model, for updates
"""
