"""Fitted models as plain arrays: written by simpart fit, read by the learned models."""
