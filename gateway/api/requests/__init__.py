"""Request bodies: schemas, messages, grammars, tools, and their validation."""
