"""Drafters and their trees side by side: what each setting brings over plain decoding on this machine."""
