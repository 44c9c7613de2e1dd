"""Load on any OpenAI-style server, and what its clients saw."""
