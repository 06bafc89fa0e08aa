#!/bin/sh
# run_logged.sh LOG COMMAND...: keeps what the command says in LOG, and shows it when it fails.
log=$1
shift
if ! "$@" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
