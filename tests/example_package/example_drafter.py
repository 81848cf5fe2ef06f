"""A drafter from elsewhere: all that a package needs so that `drafter="parrot"` finds it, beside its entry point."""

from shape.drafters.base import Committed, Drafter
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ragged_chain


class ParrotDrafter(Drafter):
    """Says the last token once more."""

    name = "parrot"

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        return ragged_chain(committed.root, [[text[-1]] for text in committed.texts])
