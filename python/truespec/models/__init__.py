"""Models: reading checkpoints and running decoders. Imports layers and kernels, no engine."""
