"""Models on disk: what a checkpoint holds, read strictly and written whole or not at all."""
