"""Room of truespec; see docs/architecture.md."""
