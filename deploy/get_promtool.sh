#!/usr/bin/env bash
# Takes promtool out of Debian's package, into the folder that is given; nothing is installed.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
command -v apt-get > /dev/null || { echo "promtool is not installed, and this is no Debian: install Prometheus" >&2; exit 1; }
to=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download -qq prometheus 2> /dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
dpkg-deb --extract prometheus_*.deb .
install -m 755 usr/bin/promtool "$to/promtool"
