"""Results: the records of a measurement, and the one door from them to labelled data."""
