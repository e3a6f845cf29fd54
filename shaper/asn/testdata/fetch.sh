#!/bin/sh
# Fetches the table that TestFullTable reads, with npm, into a directory.
# Usage: fetch.sh DIRECTORY, then SHAPERD_ASN_DATA=DIRECTORY go test ./shaper/asn
#
# The data is CC BY 4.0, of RouteViews, DB-IP and the NRO. The version is fixed:
# the test knows that version's one mistake.
set -eu

package=@ip-location-db/asn
version=2.3.2026061719

if [ $# -ne 1 ]; then
	echo "usage: $0 DIRECTORY" >&2
	exit 2
fi
mkdir -p "$1"
cd "$1"
if [ -e "version-$version" ]; then
	exit 0
fi

unpack=$(mktemp -d ./unpack.XXXXXX)
trap 'rm -rf "$unpack"' EXIT
npm pack --loglevel=error --pack-destination "$unpack" "$package@$version" >/dev/null
tar -xzf "$unpack"/*.tgz -C "$unpack" package/asn-ipv4.csv package/asn-ipv6.csv
mv "$unpack/package/asn-ipv4.csv" "$unpack/package/asn-ipv6.csv" .
# Written last: without it the next run fetches again.
: >"version-$version"
