package bpf

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// CheckProcessor returns an error if the packet plane does not run on this processor. The proxy plane
// also runs on 32-bit ones, for which neither the layout of the maps nor the kernel's 64-bit atomic
// operations are tested.
func CheckProcessor() error {
	if bits.UintSize < 64 {
		return errors.New("the packet plane needs a 64-bit processor: use a [[listen]] instead of an [[attach]]")
	}
	return nil
}

// requiredCaps are the capabilities that the packet plane needs.
var requiredCaps = []struct {
	number int
	name   string
}{
	{unix.CAP_BPF, "CAP_BPF"},             // for maps and programs
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, // for attachments, queues and devices
	{unix.CAP_PERFMON, "CAP_PERFMON"},     // for programs with pointer arithmetic
}

// Capabilities returns the names of the capabilities that the packet plane needs.
func Capabilities() (names []string) {
	for _, c := range requiredCaps {
		names = append(names, c.name)
	}
	return names
}

// checkCapabilities returns an error that names the capabilities that this process lacks.
func checkCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have [2]unix.CapUserData // 32 capabilities each
	if err := unix.Capget(&header, &have[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	var lacks []string
	for _, c := range requiredCaps {
		if have[c.number/32].Effective&(1<<(c.number%32)) == 0 {
			lacks = append(lacks, c.name)
		}
	}
	if lacks == nil {
		return nil
	}
	return missingPrivilege(strings.Join(lacks, ", "))
}

// explainPermission adds the most likely missing privilege to a permission error.
func explainPermission(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) && errors.As(err, new(*os.PathError)) {
		if lacks := checkCapabilities(); lacks != nil {
			return fmt.Errorf("%w: %w", err, lacks)
		}
		return fmt.Errorf("%w: %w; pins of another user's daemon are removed by \"shaperd detach\" as root",
			err, missingPrivilege("the system call bpf, or access to the pin directory"))
	}
	return err
}

func missingPrivilege(what string) error {
	return fmt.Errorf("the packet plane lacks %s: run shaperd as root, or copy /usr/share/doc/shaperd/examples/packet-plane.conf "+
		`to /etc/systemd/system/shaperd.service.d/ and run "systemctl daemon-reload"`, what)
}
