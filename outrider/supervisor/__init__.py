"""`outrider serve` and its helpers: the supervisor of the three processes, its dry run, health checks."""
