#!/usr/bin/env bash
# Installs the Debian releases that TestPackages boots into a directory: DIRECTORY/debian-12 and
# DIRECTORY/debian-13, each with a disk, its kernel and its initramfs. Keeps a release that is
# already there: remove its directory to install a newer one. Needs root.
# Usage: debian.sh DIRECTORY
set -euo pipefail

if (($# != 1)); then
	echo "usage: $0 DIRECTORY" >&2
	exit 2
fi
mirror=$("${BASH_SOURCE[0]%/*}/../../scripts/debian-mirror")
mkdir -p "$1"
cd "$1"

# What the tests use, and nothing that shaperd needs besides systemd. With rpm they install the other package.
packages=systemd,systemd-sysv,passwd,dbus,udev,kmod,iproute2,nftables,procps,rpm,linux-image-cloud-amd64,initramfs-tools,zstd

for line in "12 bookworm" "13 trixie"; do
	read -r release suite <<<"$line"
	if [[ -d debian-$release ]]; then
		continue
	fi
	work=$(mktemp -d "$PWD/unpack.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	mkdir -m 0755 "$work/root"
	cat >"$work/guest.service" <<-'END'
		[Unit]
		Description=Tests from the second disk
		FailureAction=poweroff-force

		[Service]
		ExecStartPre=/bin/mkdir -p /mnt/guest
		ExecStartPre=/bin/tar -x -C /mnt/guest -f /dev/vdb
		ExecStart=/mnt/guest/run
		KillMode=process
		StandardOutput=tty
		StandardError=tty
		TTYPath=/dev/ttyS0

		[Install]
		WantedBy=multi-user.target
	END
	cat >"$work/setup" <<-'END'
		set -e
		printf 'virtio_pci\nvirtio_blk\next4\n' >"$1/etc/initramfs-tools/modules"
		sed -i 's/^MODULES=.*/MODULES=list/' "$1/etc/initramfs-tools/initramfs.conf"
		chroot "$1" update-initramfs -u
		echo '/dev/vda / ext4 defaults 0 1' >"$1/etc/fstab"
		echo guest >"$1/etc/hostname"
		echo '127.0.0.1 localhost guest' >"$1/etc/hosts"
		# Nothing waits for a network, or for someone to log in.
		chroot "$1" systemctl mask getty@tty1.service serial-getty@ttyS0.service apt-daily.timer apt-daily-upgrade.timer
		chroot "$1" systemctl enable guest.service
	END
	mmdebstrap --mode=root --variant=apt --include="$packages" \
		--aptopt='Apt::Install-Recommends "false"' --dpkgopt='path-exclude=/usr/share/locale/*' \
		--essential-hook="mkdir -p \"\$1/etc/systemd/system\" && cp '$work/guest.service' \"\$1/etc/systemd/system/\"" \
		--customize-hook="sh '$work/setup' \"\$1\"" \
		"$suite" "$work/root" "$mirror"
	mkdir "$work/machine"
	cp "$work"/root/boot/vmlinuz-* "$work/machine/vmlinuz"
	cp "$work"/root/boot/initrd.img-* "$work/machine/initrd"
	truncate -s 1500M "$work/machine/disk"
	mkfs.ext4 -q -d "$work/root" "$work/machine/disk"
	# Last, so that the directory of a release is always complete.
	mv "$work/machine" "debian-$release"
	rm -rf "$work"
done
