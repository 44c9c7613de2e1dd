"""Sessions over the services: opening, relaying, resuming, and turning commits into generations."""
