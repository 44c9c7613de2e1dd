"""What is fuzzed. Each module has `fuzz(data)`, which raises for a fault, and `seeds()`, inputs to begin with."""

TARGETS = {
    "frames": ("outrider.wire", "outrider.speculation", "outrider.transport"),
    "safetensors_files": ("outrider.checkpoints", "services.draft.model.weights"),
    "torch_files": ("services.draft.model.weights",),
    "draft_checkpoints": ("outrider.checkpoints", "services.draft.formats", "services.draft.model.layers"),
    "gguf_files": ("services.target.model.gguf", "gguf"),
    "grammars": ("services.target.grammar",),
    "bodies": ("gateway.api", "gateway.text", "gateway.parsers", "gateway.orchestration", "gateway.sessions"),
}
"""Packages whose coverage guides the fuzzer, by module."""
