"""Every headline figure of the systems that SHAPE brings together, beside ours: `python -m eval.claims`."""
