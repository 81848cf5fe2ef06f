"""Measuring: speed against autoregressive decoding, with intervals and the environment beside every number."""
