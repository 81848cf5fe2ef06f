"""Variants of a predictor, trained alike and measured side by side: the parts of `eval.ablate`."""
