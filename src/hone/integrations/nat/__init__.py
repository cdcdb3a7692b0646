"""Components of NeMo Agent Toolkit in hone's YAML; imported only where the toolkit is installed."""
