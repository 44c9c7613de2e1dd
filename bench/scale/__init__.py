"""How costs grow: with context, sessions, acceptance, a slow draft and a long way to it."""
