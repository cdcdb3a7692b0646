"""Find base weights and run them: names, files, the decoder, LoRA adapters."""
