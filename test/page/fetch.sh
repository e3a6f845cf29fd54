#!/usr/bin/env bash
# Installs the packages of package-lock.json into a directory, with npm. Does nothing, and
# needs no network, if they are installed.
# Usage: fetch.sh DIRECTORY
set -euo pipefail

if (($# != 1)); then
	echo "usage: $0 DIRECTORY" >&2
	exit 2
fi
from=$(dirname "$(realpath "$0")")
mkdir -p "$1"
cd "$1"
if cmp -s "$from/package-lock.json" node_modules/.fetched; then
	exit 0
fi
cp "$from/package.json" "$from/package-lock.json" .
npm ci --ignore-scripts --no-audit --no-fund --loglevel error
cp package-lock.json node_modules/.fetched
