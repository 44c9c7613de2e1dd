"""Loading a model: checkpoints, quantization, tensor-parallel shards, and weight updates of a running model.

`load` is the entry. A new quantized checkpoint format goes into the table of `quantized`, with its arithmetic in
outrider/checkpoints/dequantize.py; `weight_quantization` is --quantization, which narrows weights as they load.
"""
