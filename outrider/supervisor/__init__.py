"""`outrider serve`: the three processes on one machine, started together and kept alive."""
