"""Sessions over the services: opening, relaying frames, recovery, and the text of generations."""
