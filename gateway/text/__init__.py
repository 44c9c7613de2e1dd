"""Text in and out: tokenizer, chat template, incremental detokenizing, stop strings."""
