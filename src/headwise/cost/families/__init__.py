"""From the configuration of a family to parts: one module for each kind of model."""
