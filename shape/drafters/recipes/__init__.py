"""Recipe packs: token continuations compiled from the target's own answers, and the drafter that reads them."""
