"""Speculation modes: which are there, what they bring at a load, and which one a step has."""
