"""transformers' generate with this predictor, in a few lines: shape does the work."""

try:
    from shape.generation.custom_generate import generate_of
except ImportError as error:
    raise ImportError("this predictor needs the package shape-decoding; install it from its repository") from error

generate = generate_of(__name__)
