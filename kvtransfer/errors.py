"""What can go wrong between two engines.

TransferError
├── IncompatibleLayout   the peer's pages mean something else; names the fields that differ. Trying again will not help
├── PeerLost             the peer is gone or cannot be reached; a hello may bring it back
├── NotAuthenticated     the peer does not know the cluster token
├── BadMessage           bytes that are no message of this version
└── BadSnapshot          a file that is no snapshot of this version, or not as it was written
"""


class TransferError(Exception):
    """The root of the tree. A message states what was wanted, what was found, and what to do."""


class IncompatibleLayout(TransferError):
    """Pages of one side cannot be read as pages of the other."""


class PeerLost(TransferError):
    """The other process died, hangs, or cannot be reached."""


class NotAuthenticated(TransferError):
    """The peer does not know the cluster's token."""


class BadMessage(TransferError):
    """Bytes that are no message of this version."""


class BadSnapshot(TransferError):
    """A file from which no request can be continued."""
