#!/bin/sh
# install.sh PYTHON WHAT LOG [ARGS]: run `pip install ARGS`, with all that it prints in the file LOG.
# Bytecode is made at the first import, of what is imported: of all files it takes as long as the rest. Where imports are
# told to keep none, it is made here.
# Meanwhile the newest line of the log is shown, in place on a terminal; if pip fails, the end of the log.
python=$1 what=$2 log=$3
shift 3
if [ -z "$PYTHONDONTWRITEBYTECODE" ]; then compile=--no-compile; else compile=--compile; fi
echo "$what (once; log: $log)"
: > "$log"
if [ -t 1 ]; then every=1 before='\r\033[K' after=''; else every=20 before='' after='\n'; fi
while kill -0 $$ 2> /dev/null && sleep "$every" > /dev/null 2>&1; do printf "$before%.79s$after" "$(tail -n 1 "$log")"; done &
shown=$!
"$python" -m pip --disable-pip-version-check install $compile --progress-bar off "$@" > "$log" 2>&1 < /dev/null &
pip=$!
trap 'kill "$shown" 2> /dev/null' EXIT
trap 'kill "$pip" 2> /dev/null; exit 130' INT
trap 'kill "$pip" 2> /dev/null; exit 143' TERM
wait "$pip"
status=$?
printf "$before"
[ "$status" -ne 0 ] || { echo "$what: done"; exit; }
echo "$what: failed with status $status; the end of $log:"
tail -n 40 "$log"
exit "$status"
