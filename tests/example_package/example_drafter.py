"""A drafter from elsewhere: all that a package needs so that `drafter="parrot"` finds it, beside its entry point."""

from shape.drafters.base import Drafter, Settled
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ragged_chain


class ParrotDrafter(Drafter):
    """Says the last token once more."""

    name = "parrot"

    def draft(self, settled: Settled, sampler: Sampler) -> TokenTree:
        return ragged_chain(settled.root, [[text[-1]] for text in settled.texts])
