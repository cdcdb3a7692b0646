"""The vLLM engine: a vLLM server in a separate process."""
