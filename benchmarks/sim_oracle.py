"""A chooser that sees into every replica, with no delay and no estimate.

Owns:      nothing. It compares the true time to first token at each replica as of now and takes the least; it does not
           know the future, and does not ask what its choice costs others. No router sees this much; it tells how much
           of a result is the information's fault, and a rule that looks further can still do better.
"""

from collections.abc import Sequence

from benchmarks.sim_replica import SimJob, SimReplica


def soonest(replicas: Sequence[SimReplica], job: SimJob) -> SimReplica:
    """The replica at which ``job`` gets its first token first; the first of equals."""
    return min(replicas, key=lambda replica: replica.true_ttft_s(job))
