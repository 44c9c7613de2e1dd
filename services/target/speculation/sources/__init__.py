"""Draft sources of the target.

Proposals of the draft service, prompt lookup, the quantized self-draft, and the local EAGLE head.
"""
