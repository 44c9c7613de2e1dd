"""Response bodies: completions, streaming chunks, log-probabilities, errors."""
