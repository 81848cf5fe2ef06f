"""transformers' generate with this predictor, in a few lines: shape does the work."""

try:
    from shape.custom_generate import generate
except ImportError as error:
    raise ImportError("this predictor needs the package shape-decoding; install it, then try again") from error

__all__ = ["generate"]
