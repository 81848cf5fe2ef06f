"""Finds what ships with SHAPE (configs, data, the quickstart checkpoints) in a checkout or in a wheel.

The wheel carries the repository's top-level folders inside the package, in `shape/_bundled`; a checkout, and
an editable install of one, has them beside the package.
"""

from pathlib import Path

from shape.errors import ConfigError

TARGET, PREDICTOR = "quickstart-target", "quickstart-shape"
CHECKPOINTS = (TARGET, PREDICTOR, "quickstart-paper")
"""Names that may stand wherever a model folder or hub id may."""

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """The folder that holds `configs/`, `data/` and `checkpoints/`."""
    in_wheel = _PACKAGE / "_bundled"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent


def path(*parts: str) -> Path:
    """The file or folder of that name, for example `path("data", "bench.jsonl")`.

    Raises `ConfigError` where it is absent, which means a damaged installation or a checkout without its
    trained checkpoints.
    """
    found = root().joinpath(*parts)
    if not found.exists():
        raise ConfigError(
            f"{'/'.join(parts)} does not ship with this installation of shape (looked in {root()}); "
            "reinstall it, or name a file or folder of your own"
        )
    return found


def resolve(name: str) -> str:
    """Maps a name of `CHECKPOINTS` to its folder; passes paths and hub ids through.

    A folder of that very name in the working directory is not preferred: the name always means what ships;
    `./quickstart-target` means the folder.
    """
    return str(path("checkpoints", name)) if name in CHECKPOINTS else name
