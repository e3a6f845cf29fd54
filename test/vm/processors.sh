#!/usr/bin/env bash
# Fetches what TestProcessors boots, with apt from Debian 13, into a directory: DIRECTORY/arm64,
# DIRECTORY/armv7 and DIRECTORY/riscv64, each with vmlinuz, its modules, and a static busybox.
# Installs nothing. Keeps what is already there: remove a directory to fetch it again.
# Usage: processors.sh DIRECTORY
set -euo pipefail

# The processor, its name in Debian, and the metapackage that depends on the newest kernel.
processors=(
	"arm64   arm64   linux-image-cloud-arm64"
	"armv7   armhf   linux-image-armmp"
	"riscv64 riscv64 linux-image-riscv64"
)

if (($# != 1)); then
	echo "usage: $0 DIRECTORY" >&2
	exit 2
fi
mirror=$("${BASH_SOURCE[0]%/*}/../../scripts/debian-mirror")
mkdir -p "$1"
cd "$1"

# Runs apt for the processor, as the current user.
apt() {
	"apt-$1" -q -o APT::Sandbox::User= -o APT::Architecture="$debian" -o APT::Architectures::="$debian" \
		-o Dir::Etc::SourceList="$unpack/sources.list" -o Dir::Etc::SourceParts=/dev/null \
		-o Dir::State::Lists="$unpack/lists" -o Dir::Cache="$unpack/cache" -o Dir::State::Status=/dev/null "${@:2}"
}

for line in "${processors[@]}"; do
	read -r processor debian package <<<"$line"
	if [[ -d $processor ]]; then
		continue
	fi
	unpack=$(mktemp -d "$PWD/unpack.XXXXXX")
	trap 'rm -rf "$unpack"' EXIT
	mkdir -p "$unpack/lists/partial" "$unpack/cache/archives/partial" "$unpack/root" "$unpack/machine"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$unpack/sources.list"
	apt get update
	image=$(apt cache depends "$package" | awk '$1 == "Depends:" { print $2; exit }')
	(
		cd "$unpack/root"
		apt get download "$image" busybox-static
		for deb in ./*.deb; do
			dpkg-deb -x "$deb" .
		done
		modules=$(echo usr/lib/modules/*)
		# The guests have no devices.
		rm -rf "$modules"/kernel/{arch,drivers,fs,sound}
		find "$modules" -name '*.ko.xz' -exec xz --decompress {} +
		# busybox looks in /lib.
		ln -s usr/lib lib
		busybox depmod -b . "${modules##*/}"
		mv boot/vmlinu[xz]-* "$unpack/machine/vmlinuz"
		mv usr/bin/busybox "$unpack/machine/"
		mv "$modules" "$unpack/machine/modules"
	)
	# Last, so that the directory of a processor is always complete.
	mv "$unpack/machine" "$processor"
	rm -rf "$unpack"
done
