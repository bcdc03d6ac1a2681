"""Sizes of small encoder–decoders: primes where the family allows them."""

from __future__ import annotations

SOURCE = 19  # tokens of the encoder; Whisper has no other number
T5 = {
    "vocab_size": 97, "d_model": 23, "d_kv": 7, "d_ff": 37, "num_layers": 2,
    "num_decoder_layers": 5, "num_heads": 3, "relative_attention_num_buckets": 16,
    "decoder_start_token_id": 0, "num_labels": 13, "eos_token_id": 1,
}  # fmt: skip
BART = {
    "vocab_size": 97, "max_position_embeddings": 41, "d_model": 30, "encoder_layers": 2,
    "decoder_layers": 5, "encoder_attention_heads": 2, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 37, "decoder_ffn_dim": 43, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
WHISPER = {
    **{key: value for key, value in BART.items() if key != "max_position_embeddings"},
    "num_mel_bins": 5, "max_source_positions": SOURCE, "max_target_positions": 41,
    "classifier_proj_size": 17, "num_labels": 7,
}  # fmt: skip
