"""The REST edge: OpenAI-style routes, their bodies and their errors."""
