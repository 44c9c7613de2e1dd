"""`outrider draft --online`: a draft that learns from the traffic that it serves."""
