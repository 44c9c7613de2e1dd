"""Prompts as a model expects them: chat template and tokenizer."""
