"""The gateway: OpenAI-style REST and gRPC for clients, streams to the services. Neither JAX nor PyTorch."""
