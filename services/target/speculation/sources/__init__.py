"""Draft sources inside the target process: prompt lookup, the quantized self-draft, the local EAGLE head."""
