"""Compiled programs: one expansion of a draft tree, whole trees, candidate sampling."""
