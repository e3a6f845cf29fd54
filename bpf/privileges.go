package bpf

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// needed are the capabilities that the packet plane takes.
var needed = []struct {
	number int
	name   string
}{
	{unix.CAP_BPF, "CAP_BPF"},             // to make maps and programs
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, // to attach programs, and for queues and devices
	{unix.CAP_PERFMON, "CAP_PERFMON"},     // for programs that add to pointers
}

// Capabilities returns the names of the capabilities that the packet plane takes.
func Capabilities() (names []string) {
	for _, c := range needed {
		names = append(names, c.name)
	}
	return names
}

// mayOpen returns an error that names the capabilities that this process lacks.
func mayOpen() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have [2]unix.CapUserData // 32 capabilities each
	if err := unix.Capget(&header, &have[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	var lacks []string
	for _, c := range needed {
		if have[c.number/32].Effective&(1<<(c.number%32)) == 0 {
			lacks = append(lacks, c.name)
		}
	}
	if lacks == nil {
		return nil
	}
	return lacking(strings.Join(lacks, ", "))
}

// privileges adds to an error what is most often missing.
func privileges(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) && errors.As(err, new(*os.PathError)) {
		if lacks := mayOpen(); lacks != nil {
			return fmt.Errorf("%w: %w", err, lacks)
		}
		return fmt.Errorf("%w: %w; what a daemon of another user left there, \"shaperd detach\" takes away as root",
			err, lacking("the system call bpf, or access to what is in the folder of pins"))
	}
	return err
}

func lacking(what string) error {
	return fmt.Errorf("the packet plane lacks %s: run shaperd as root, or copy /usr/share/doc/shaperd/examples/packet-plane.conf "+
		`to /etc/systemd/system/shaperd.service.d/ and run "systemctl daemon-reload"`, what)
}
