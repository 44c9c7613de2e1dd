"""`outrider serve` and its helpers: the supervisor of the three processes, health checks, the machine's facts."""
