"""Decoding: `ShapeDecoder`, requests, the loop and its fixed-shape form, control of speculation, statistics."""
