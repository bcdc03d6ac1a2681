"""What heads are made of: W_QK and W_OV of every head, kept as their factors.

Import from its modules: ``head_weights`` reads them off a model, ``factored`` holds a product as
its two thin factors; everything else computes with those two.
"""
