"""The worlds of this repository, each a module or a package. envs.ENVS lists them; this imports none."""
