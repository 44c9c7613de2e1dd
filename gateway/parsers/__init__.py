"""Output parsers: tool calls and reasoning, taken out of the generated text."""
