"""What makes decoding lossless: token trees, the ragged KV cache, noise, and acceptance rules."""
