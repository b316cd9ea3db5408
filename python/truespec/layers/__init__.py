"""Layers: parts of models that are more than one kernel, and sampling. Imports kernels only."""
