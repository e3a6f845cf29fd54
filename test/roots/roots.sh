#!/usr/bin/env bash
# Makes the roots that the tests of this package copy, from Debian 13, in a directory: DIRECTORY/rpm with rpm and
# systemd, DIRECTORY/alpine with OpenRC and a busybox that has the commands of Alpine's. Keeps what is already there.
# Needs root.
# Usage: roots.sh DIRECTORY
set -euo pipefail

if (($# != 1)); then
	echo "usage: $0 DIRECTORY" >&2
	exit 2
fi
mirror=$("${BASH_SOURCE[0]%/*}/../../scripts/debian-mirror")
mkdir -p "$1"
cd "$1"

# bootstrap VARIANT PACKAGES HOOK installs packages into $work/root, and runs the hook on it.
bootstrap() {
	local variant=$1 packages=$2 hook=$3
	mmdebstrap --mode=root --variant="$variant" --include="$packages" --aptopt='Apt::Install-Recommends "false"' \
		--dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--customize-hook="$hook" trixie "$work/root" "$mirror"
}

for root in rpm alpine; do
	if [[ -d $root ]]; then
		continue
	fi
	work=$(mktemp -d "$PWD/unpack.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	case $root in
	rpm)
		# The shell of Fedora and openSUSE is bash.
		bootstrap minbase rpm,systemd 'ln -sf bash "$1/bin/sh"'
		;;
	alpine)
		# Debian's busybox has no adduser.
		(
			cd "$work"
			mkdir -p lists/partial cache
			echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >sources.list
			apt=(apt-get -q -o APT::Sandbox::User= -o Dir::Etc::SourceList="$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null
				-o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache")
			"${apt[@]}" update
			"${apt[@]}" source --download-only busybox
			mkdir busybox
			tar -x -C busybox --strip-components=1 -f busybox_*.orig.tar.*
			cd busybox
			make -s defconfig
			# tc does not compile with the headers of newer kernels.
			sed -i 's/^# CONFIG_STATIC is not set$/CONFIG_STATIC=y/; s/^CONFIG_TC=y$/# CONFIG_TC is not set/' .config
			make -s silentoldconfig </dev/null
			make -s -j2
		) >"$work/busybox.log" 2>&1 || { tail -30 "$work/busybox.log" >&2; exit 1; }
		bootstrap minbase openrc true
		install "$work/busybox/busybox" "$work/root/bin/busybox"
		for command in sh addgroup adduser deluser ip nc wget; do
			rm -f "$work"/root/{bin,sbin,usr/bin,usr/sbin}/$command
			ln -s busybox "$work/root/bin/$command"
		done
		;;
	esac
	# Last, so that a root is always complete.
	mv "$work/root" "$root"
	rm -rf "$work"
done
