"""Outrider beside other inference systems, on equal weights, prompts and limits, alternating in one run."""
