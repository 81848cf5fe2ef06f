"""The commands, one file each: `shape NAME`, or `python -m shape.NAME`. Nothing imports them."""
