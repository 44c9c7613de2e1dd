"""What a model's text is made of: reasoning, content, and calls of tools, taken apart as it comes."""
