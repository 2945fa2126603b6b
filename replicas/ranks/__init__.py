"""The processes of a tensor-parallel replica: plans to its followers, and their ports to the transfer library."""
