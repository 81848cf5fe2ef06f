"""`python -m eval.peers`."""

from eval.peers.run import main

main()
