"""What the peers' programs share: lines of JSON in and out. Standard library only, as each has its own environment.

    python -m eval.peers.scripts.NAME convert SOURCE DESTINATION PRECISION
    python -m eval.peers.scripts.NAME serve MODEL PRECISION THREADS [BACKEND]

`convert` makes what `serve` loads from a folder in the format of transformers, for those that do not load such a folder
itself. `serve` says its versions once the model is loaded, then answers each request {"prompt", "method", "new_tokens",
"end_tokens"} with {"tokens", "prefill_seconds", "decode_seconds"}, and "forwards" where drafts are verified. The first
token ends the prefill; no token stops an answer where "end_tokens" is empty.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def run(
    serve: Callable[..., tuple[Answer, dict[str, str]]], convert: Callable[[str, str, str], None] | None = None
) -> None:
    """Do what the command line says.

    Args:
        serve: of model, precision, threads and perhaps a backend; returns what answers requests, and versions by
            package.
        convert: of source, destination and precision.
    """
    command, *arguments = sys.argv[1:]
    if command == "convert" and convert is not None:
        source, destination, precision = arguments
        convert(source, destination, precision)
        return
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the replies
    model, precision, threads, *backend = arguments
    answer, versions = serve(model, precision, int(threads), *backend)
    print(json.dumps({"versions": versions}), file=replies)
    gc.collect()
    gc.freeze()  # else looking through all that is loaded, a third of a second, falls on some answer
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies)
