"""Send what a run does to W&B, Langfuse, MLflow and others: each in a process of its own."""
