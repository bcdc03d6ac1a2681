"""The command line: thin calls of the public functions. Nothing heavy is imported here."""
