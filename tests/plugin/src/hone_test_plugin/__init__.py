"""A workflow, a reward, and a whole training stack of its own, as a package beside hone."""
