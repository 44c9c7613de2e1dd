"""`make soak`: clients with mixed requests for an hour. Memory stays flat, texts the same, and no warning appears."""
