"""What a transformer costs, from its sizes alone: exact integers, without weights and torch."""
