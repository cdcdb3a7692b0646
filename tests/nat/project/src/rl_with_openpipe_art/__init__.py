"""A project of NeMo Agent Toolkit, with the names of its example `rl_with_openpipe_art`."""
