#!/bin/sh
# The first process of a guest. It sets up the system that tests expect, runs them, and
# powers off. If it ends before that, the kernel panics.
#
# The tests write to the second serial port, if there is one, so that kernel messages do not mix
# with their output. Lines that start with the byte 1 are framing.
set -eu
export PATH=/bin:/usr/bin HOME=/root TMPDIR=/tmp

/bin/busybox mkdir -p /dev /etc /proc /root /run /sys /tmp /usr/bin
/bin/busybox --install -s /usr/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t tmpfs run /run
while read -r module; do
	insmod "$module"
done </modules/order
for link in dummy0 ifb0 ifb1; do # created by the modules
	[ ! -e "/sys/class/net/$link" ] || ip link delete "$link"
done
ip link set lo up
echo 127.0.0.1 localhost >/etc/hosts

port=/dev/${output:-ttyS1} # from the kernel command line
stty -F "$port" raw
exec 3>"$port"
read -r uptime _ </proc/uptime
printf '\001booted %s %s\n' "$(uname -r)" "$uptime" >&3
while read -r suite; do
	cd "/suites/$suite"
	set --
	while read -r arg; do
		set -- "$@" "$arg"
	done <args
	printf '\001begin %s\n' "$suite" >&3
	status=0
	./test "$@" </dev/null >&3 2>&1 || status=$?
	printf '\001end %s\n' "$status" >&3
done </suites/order
printf '\001off\n' >&3
stty -F "$port" raw # waits until the output is sent
poweroff -f
