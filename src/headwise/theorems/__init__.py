"""Statements about transformers as checks that run: prediction, measurement, control, verdict."""
