"""Speedup of speculation settings (drafters and tree shapes) over plain decoding on the present machine."""
