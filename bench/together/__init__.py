"""Several drafters in one draft tree, replayed: which of their draft tokens a step should verify."""
