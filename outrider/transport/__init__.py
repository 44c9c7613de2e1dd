"""Bidirectional streams between processes: the gRPC server, streams over Unix sockets, and unsent output."""
