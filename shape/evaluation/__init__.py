"""Measuring: speed against plain decoding, with intervals and the environment beside every number."""
