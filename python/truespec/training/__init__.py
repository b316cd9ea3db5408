"""Training of drafters, in stages over files: collect features, warm start, train, export.

Knows the package's public surface, the checkpoint format and torch; no room of the engine.
"""
