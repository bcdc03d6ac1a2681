"""Results of papers, repeated: what was claimed, and what is found."""
