"""The state of a session, which the gateway owns: request, committed tokens, step statistics."""
