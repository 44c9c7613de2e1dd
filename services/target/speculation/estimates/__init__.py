"""Estimates behind the decisions: what a step costs, and how likely draft tokens are accepted."""
