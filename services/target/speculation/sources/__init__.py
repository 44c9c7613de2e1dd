"""Draft sources of the target: proposals of the draft service, prompt lookup, the quantized self-draft, the local EAGLE head."""
