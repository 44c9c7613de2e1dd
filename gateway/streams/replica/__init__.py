"""The parts of a link to a replica: attempts to connect, frame stream, reported load, and the reason of absence."""
