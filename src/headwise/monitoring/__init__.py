"""Training health: what every head, layer and weight does while a run goes on, in any loop."""
