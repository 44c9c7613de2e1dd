"""The model: loaded by `transformers`, with the attention of this package and its paged cache behind it."""
