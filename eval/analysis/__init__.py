"""The sections of `eval.analyze`."""
