"""The draft service as a process: flags, construction of drafters, the gRPC service.

app.py           the life of the process
attempts.py      loads again after a failure
flags.py         meaning and consistency of the flags
service.py       the gRPC service
loading.py       builds a drafter with a model from the parts below
checkpoints.py   chooses the format reader of a checkpoint
weights.py       number format, quantization and placement of weights, and the attention kernel
"""
