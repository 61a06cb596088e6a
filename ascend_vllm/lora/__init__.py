"""LoRA adapters as callers name them: the import path is vLLM's."""
