#!/usr/bin/env bash
# Fetches the Debian kernels that TestKernels boots, with apt, into a directory:
# DIRECTORY/6.1 and DIRECTORY/6.12, each with vmlinuz and its modules. Installs nothing.
# Keeps a kernel that is already there: remove its directory to fetch a newer one.
# Usage: fetch.sh DIRECTORY
set -euo pipefail

# The series, and the metapackage that depends on its newest kernel.
kernels=(
	"6.1   linux-image-cloud-amd64"
	"6.12  linux-image-6.12-cloud-amd64"
)

if (($# != 1)); then
	echo "usage: $0 DIRECTORY" >&2
	exit 2
fi
mkdir -p "$1"
cd "$1"

# Runs apt as the current user, without root and without the sandbox user.
apt() {
	"apt-$1" -q -o APT::Sandbox::User= -o Dir::State::Lists="$unpack/lists" -o Dir::Cache="$unpack/cache" "${@:2}"
}

unpack=
for line in "${kernels[@]}"; do
	read -r series package <<<"$line"
	if [[ -d $series ]]; then
		continue
	fi
	if [[ -z $unpack ]]; then
		unpack=$(mktemp -d "$PWD/unpack.XXXXXX")
		trap 'rm -rf "$unpack"' EXIT
		mkdir -p "$unpack/lists/partial" "$unpack/cache/archives/partial"
		apt get update
	fi
	image=$(apt cache depends "$package" | awk '$1 == "Depends:" { print $2; exit }')
	if [[ $image != "linux-image-$series."* ]]; then
		echo "fetch.sh: $package depends on \"$image\", not on a Linux $series" >&2
		exit 1
	fi
	mkdir "$unpack/$series"
	cd "$unpack/$series"
	apt get download "$image"
	dpkg-deb -x ./*.deb .
	# The package's install script would generate the module dependencies.
	find lib/modules -name '*.ko.xz' -exec xz --decompress {} +
	busybox depmod -b . "${image#linux-image-}"
	mkdir kernel
	mv boot/vmlinuz-* kernel/vmlinuz
	mv lib/modules/* kernel/modules
	cd - >/dev/null
	# Last, so that the directory named after the series is always complete.
	mv "$unpack/$series/kernel" "$series"
done
