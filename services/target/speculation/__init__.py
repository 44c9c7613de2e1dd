"""Which draft tokens a step verifies: draft sources, cost model, verification budget, mode selector."""
