"""The state of a session, which the gateway owns: specification, committed tokens, statistics, recovery."""
