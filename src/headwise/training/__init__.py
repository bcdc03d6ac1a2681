"""Training a decoder on text: tokenizer, data, schedule, loop, checkpoints, logs."""
