"""Send a run to W&B, Langfuse, MLflow and others, each in a separate process."""
