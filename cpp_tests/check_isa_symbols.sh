#!/bin/sh
# check_isa_symbols.sh NM OBJECT...
# Fails when a kernel object compiled for one instruction set defines a symbol that the linker could
# give to other code: anything weak, and anything global outside that level's own namespace.
nm=$1
shift
status=0
for object in "$@"; do
  symbols=$("$nm" --defined-only --extern-only "$object") || exit 1
  leaks=$(printf '%s\n' "$symbols" | awk 'NF == 3 && ($2 !~ /^[BDRT]$/ || $3 !~ /^_ZN6kvcore[0-9]+isa_/)')
  tables=$(printf '%s\n' "$symbols" | grep -c .)
  if [ -n "$leaks" ]; then
    printf '%s leaks:\n%s\n' "$object" "$leaks"
    status=1
  fi
  if [ "$tables" -ne 1 ]; then
    printf '%s: expected one exported table, got %s symbols\n' "$object" "$tables"
    status=1
  fi
done
[ $# -gt 0 ] || { echo "no objects given"; status=1; }
exit $status
