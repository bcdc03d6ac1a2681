"""Measuring transformers models: loading, observing, the main loop. Import from its modules."""
