"""Evaluation beside training on several ranks: each captures its part, the first one evaluates."""
