"""The target as a process: start-up, the gRPC service, control of a running engine, warm-up, tensor-parallel ranks."""
