"""What both services share around their engines: sessions, scheduling, the engine loop and its messages."""
