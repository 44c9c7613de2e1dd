"""Outrider as a rollout engine of verl: `plugin` registers it."""
