"""What the ``custom_generate/generate.py`` of exported folders imports: this name is stable."""

from shape.generation.custom_generate import generate_of as generate_of
