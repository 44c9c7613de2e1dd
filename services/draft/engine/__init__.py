"""The draft engine: grows the draft trees of all sessions and sends proposals."""
