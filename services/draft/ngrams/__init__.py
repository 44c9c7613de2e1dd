"""Stored n-grams: a trie of token paths, and how it is asked what comes next."""
