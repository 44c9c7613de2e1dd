"""Bidirectional streams: the gRPC server, streams over a Unix socket, outgoing queues."""
