"""Hidden states for feature-based drafters: capture, fusion, and the store beside cached prefix pages."""
