"""Room of benchmarks a user runs on a model and drafter of their own."""
