"""Decoders as compiled programs: a step, several steps, or a fused speculation loop in one call."""
