"""The draft service as a process: flags, loading, the gRPC service."""
