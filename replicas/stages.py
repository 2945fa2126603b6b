"""Where the time of one request went: its stamps as `StageTimes`.

Owns:      the reading of the stamps; they are set where things happen, each once: arrival (request.py), row and pages
           (scheduler/prealloc.py), the rest in scheduler/scheduler.py.
Invariant: no stage is negative, and they sum to the time from arrival to the end.

    all of it here     arrival ──queue──> admitted ──prefill──> first token ──decode──> end
    prefill leg        arrival ──queue──> admitted ──prefill──> last step ──transfer──> end
    decode leg         arrival ──queue──> granted ──transfer──> its K/V and first token ──decode──> end
      computed here    arrival ──queue──> granted ──transfer──> failed ──queue──> admitted ──prefill──> ...

A prefill leg's queue is also its receiver's: it starts when that has row and pages. A request that ends early has the
stages that it came to. One that is retracted stays in the stage it was in: its time back in the queue is prefill_s
before its first token, and decode_s after it.
"""

from replicas.request import Req
from replicas.types import StageTimes


def stage_times(req: Req) -> StageTimes:
    """Of a request that has ended."""
    end_s, first_s = req.ended_s, req.first_token_s
    assert end_s is not None, f"request {req.rid} has not ended"
    leg = req.leg
    queue_s = transfer_s = 0.0
    since_s = req.arrival_s
    if leg is not None and leg.granted_s is not None:
        queue_s, since_s = leg.granted_s - since_s, leg.granted_s
        if leg.failed_s is None:  # received, or ended before
            come_s = end_s if first_s is None else first_s
            return StageTimes(queue_s=queue_s, transfer_s=come_s - since_s, decode_s=end_s - come_s)
        transfer_s, since_s = leg.failed_s - since_s, leg.failed_s
    if req.admitted_s is None:
        return StageTimes(queue_s=queue_s + end_s - since_s, transfer_s=transfer_s)
    queue_s += req.admitted_s - since_s
    if first_s is None:
        return StageTimes(queue_s=queue_s, prefill_s=end_s - req.admitted_s, transfer_s=transfer_s)
    prefill_s, after_s = first_s - req.admitted_s, end_s - first_s
    if req.is_prefill_leg:
        return StageTimes(queue_s=queue_s, prefill_s=prefill_s, transfer_s=after_s)
    return StageTimes(queue_s=queue_s, prefill_s=prefill_s, transfer_s=transfer_s, decode_s=after_s)
