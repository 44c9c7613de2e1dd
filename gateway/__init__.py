"""The gateway: REST and gRPC for clients, streams to the services. It imports neither JAX nor PyTorch.

process        the process: start-up, listeners, worker processes
facade         gRPC services of other engines, for their routers
api, grpc      the REST and gRPC services; a new endpoint goes to api/routes
control        weight updates, flush, pause and abort over all replicas and workers; server information
orchestration  sessions over the services: opening, relaying, resuming; generations
pools          which replica gets a session
telemetry      metrics, spans, the request log; a new metric goes here
parsers        tool calls and reasoning in generated text
sessions       the state of a session: request, committed tokens, statistics
streams        reconnecting bidirectional streams to replicas
text           tokenizer, detokenizer, stop strings
admission      API keys, limits, Retry-After (429 is decided here)
page           the chat at /
workers        the parent of several gateway processes, and how they reach one another
"""
