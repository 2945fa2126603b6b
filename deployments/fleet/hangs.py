"""Which replicas hang: silent, or in a step that does not end, while another one could go on.

Owns:      the last report of every replica that is connected, also of those that drain and are no members any more.
Never:     fails streams (channel_server.py) or passes replicas over (fleet.py).
Invariant: none hangs while no other one speaks: then the machine is busy, or there is nowhere to go.
Thread:    the router's event loop.

A step counts as hung after ``hang_s``, but not before SLOWER times the longest recent step of any replica: one that
has ended elsewhere tells that such steps are slow. Nor does one of an engine's first steps, which may compile. A
request that is only slow is left at most ``max_tries`` - 1 times, since the last try stays (tries.py).
"""

from collections.abc import Callable, Container, Iterable

from deployments.channel.frames import ReplicaReport

SETTLED_STEPS = 16  # before these a long step may be one that compiles
SLOWER = 4.0


class Hangs:
    """Told of every report."""

    def __init__(self, *, hang_s: float, silent_s: float, clock: Callable[[], float]) -> None:
        """``hang_s``: silent, or in one step, for so long, it hangs; ``silent_s``: for so long, it does not speak."""
        self._hang_s = max(hang_s, silent_s)
        self._silent_s = silent_s
        self._clock = clock
        self._said: dict[str, tuple[float, ReplicaReport]] = {}

    def heard(self, replica_id: str, report: ReplicaReport) -> None:
        self._said[replica_id] = (self._clock(), report)

    def lost(self, replica_id: str) -> None:
        """Its connection has ended, and its streams with it."""
        self._said.pop(replica_id, None)

    def stood_still(self, seconds: float) -> None:
        """This process has not run for ``seconds``, in which nobody could be heard."""
        now_s = self._clock()
        self._said = {each: (min(s + seconds, now_s), report) for each, (s, report) in self._said.items()}

    def find(self, able: Iterable[str], *, prefill: Container[str] = ()) -> dict[str, str]:
        """The replicas that hang, and how; none where none of ``able`` speaks, which could go on with a request.

        Args: prefill: prefill replicas. A silent one hangs after twice ``hang_s``: the heartbeats of the decode side
              find its silence first, and the decode side then computes the prompt without another try.
        """
        now_s = self._clock()
        longest_s = max((report.stats.longest_step_s for _, report in self._said.values()), default=0.0)
        step_s = max(self._hang_s, SLOWER * longest_s)
        found = {}
        for each, (heard_s, report) in self._said.items():
            settled = report.stats.num_extend_steps + report.stats.num_decode_steps >= SETTLED_STEPS
            if now_s - heard_s >= self._hang_s * (2 if each in prefill else 1):
                found[each] = f"it has said nothing for {now_s - heard_s:.1f} s"
            elif settled and report.step_age_s >= step_s:
                found[each] = f"its step has been running for {report.step_age_s:.1f} s"
        return found if any(self._speaks(each, now_s) for each in able if each not in found) else {}

    def _speaks(self, replica_id: str, now_s: float) -> bool:
        said = self._said.get(replica_id)
        return said is not None and now_s - said[0] < self._silent_s and said[1].error is None
