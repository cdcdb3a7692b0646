"""The engine in plain torch: continuous batching, KV cache, prefix cache."""
