"""Drafters of SHAPE inside engines that exist."""
