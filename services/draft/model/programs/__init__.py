"""Compiled programs: steps of the model, whole trees, candidate sampling; and the runner that measures them."""
