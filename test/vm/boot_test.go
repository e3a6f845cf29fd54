package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options are of every kernel command line.
var options = []string{
	"panic=-1", "oops=panic",
	"mitigations=off", // the guest trusts its tests
	// The emulated time stamp counter is the host's. Some kernels distrust it because of the
	// processor's model name, and fall back to a clock that is slow to read.
	"tsc=reliable",
}

// A machine is what a guest boots from.
type machine struct {
	qemu    []string // the emulator, its processors and memory; nil is that of amd64
	kernel  string
	initrd  string
	options []string // the kernel command line
	disks   []string // raw
}

// boot runs a machine until it powers off or reboots, and returns the output of the tests, the
// kernel's console and the CPU time, even with an error. The guest ends with ctx, with this
// process, or when its kernel panics. Its output is in dir.
func boot(ctx context.Context, dir string, m machine) (output, console []byte, cpu time.Duration, err error) {
	var disks []string
	for _, disk := range m.disks {
		// A guest that ends early leaves nothing of use: its writes need not reach a disk here.
		disks = append(disks, "-drive", "if=virtio,format=raw,cache=unsafe,file="+disk)
	}
	if m.qemu == nil {
		m.qemu = []string{"qemu-system-x86_64", "-cpu", "max", "-smp", "2", "-m", "2G", "-serial", "file:console"}
	}
	cmd := exec.CommandContext(ctx, m.qemu[0], slices.Concat(m.qemu[1:], []string{
		"-nodefaults", "-no-user-config", "-display", "none",
		// With a thread per processor, qemu before 8.1 may execute code that another processor has
		// just overwritten, and a kernel that patches itself panics occasionally:
		// https://gitlab.com/qemu-project/qemu/-/commit/deba78709a
		"-accel", "tcg,thread=single",
		"-serial", "file:output",
		"-no-reboot", // a panic resets the machine, which ends it
		"-kernel", m.kernel, "-initrd", m.initrd, "-append", strings.Join(m.options, " "),
	}, disks)...)
	if cmd.Err != nil {
		return nil, nil, 0, fmt.Errorf("%w: run \"make deps\" to install it", cmd.Err)
	}
	var qemuOutput bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &qemuOutput, &qemuOutput
	// The kernel kills it when the thread that started it ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err = cmd.Start(); err == nil {
		// The guest's clock continues while other processes run, so the guest should preempt them.
		// Raising the priority needs a privilege, hence the ignored error.
		_ = syscall.Setpriority(syscall.PRIO_PROCESS, cmd.Process.Pid, -10)
		err = cmd.Wait()
		cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		err = fmt.Errorf("run guest: %w\n%s", err, qemuOutput.Bytes())
	}
	output, outputErr := os.ReadFile(filepath.Join(dir, "output"))
	console, consoleErr := os.ReadFile(filepath.Join(dir, "console"))
	if errors.Is(consoleErr, fs.ErrNotExist) { // a machine with one serial port
		console, consoleErr = output, nil
	}
	err = errors.Join(err, outputErr, consoleErr)
	if err == nil && !bytes.Contains(output, []byte(mark+"off\n")) {
		err = errors.New("the guest ended before its tests")
	}
	return output, console, cpu, err
}

// lastLines returns the last n lines of text, or all when there are fewer.
func lastLines(text []byte, n int) []byte {
	text = bytes.TrimSpace(bytes.ReplaceAll(text, []byte("\r"), nil))
	at := len(text)
	for ; n > 0 && at >= 0; n-- {
		at = bytes.LastIndexByte(text[:at], '\n')
	}
	return text[at+1:]
}
