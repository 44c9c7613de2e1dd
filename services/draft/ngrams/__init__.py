"""Stored n-grams: a trie of token paths, and lookups of continuations, compiled in C++ with a twin in Python."""
