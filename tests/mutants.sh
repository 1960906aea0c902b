#!/usr/bin/env bash
# make mutants MODULE=… TESTS=…: cosmic-ray changes one operator, constant or branch of MODULE at a time, in a copy of the
# checkout, and runs TESTS. It prints the changes that no test noticed and their share of all.
set -euo pipefail
python=$(realpath -s "$1")
module=$2
tests=$3
root=$(git rev-parse --show-toplevel)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
(cd "$root" && git ls-files -z | xargs -0 cp --parents -P -t "$copy")
cd "$copy"
cat > mutants.toml <<TOML
[cosmic-ray]
module-path = "$module"
timeout = 120.0
excluded-modules = []
test-command = "$python -m pytest -x -q -p no:cacheprovider $tests"
[cosmic-ray.distributor]
name = "local"
TOML
bin=$(dirname "$python")
export OMP_NUM_THREADS=1
"$python" -m pytest -x -q -p no:cacheprovider $tests
"$bin/cosmic-ray" init mutants.toml mutants.sqlite
"$bin/cosmic-ray" exec mutants.toml mutants.sqlite
"$bin/cr-report" --show-diff --surviving-only mutants.sqlite
echo "share of changes that no test noticed, in percent: $("$bin/cr-rate" mutants.sqlite)"
