"""A model's text side, from the files of its checkpoint: tokenizer, special tokens and chat templates."""
