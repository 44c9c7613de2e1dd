"""A load generator for OpenAI-style servers: throughput, latency and speculation as clients observe them."""
