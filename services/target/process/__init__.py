"""The target process: start-up, gRPC service, control of a running engine, warm-up, tensor-parallel workers."""
