"""Scores of a model."""
