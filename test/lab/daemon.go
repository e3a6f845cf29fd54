package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
)

// Binary returns the absolute path of the daemon under test: SHAPERD_BIN, or else bin/shaperd of
// this source tree.
func Binary() (string, error) {
	path := os.Getenv("SHAPERD_BIN")
	if path == "" {
		root, err := os.Getwd()
		for err == nil {
			if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil || root == "/" {
				break
			}
			root = filepath.Dir(root)
		}
		path = filepath.Join(root, "bin", "shaperd")
	}
	path, err := filepath.Abs(path)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		return "", fmt.Errorf("no daemon: %w\nrun \"make build\" first, or set SHAPERD_BIN to the binary", err)
	}
	return path, nil
}

// DaemonOptions describe a daemon to start.
type DaemonOptions struct {
	Binary  string              // its path; "" is [Binary]
	Wrapper []string            // a command that executes the daemon, such as unshare
	Host    *Host               // where it runs; nil is this program's own namespace
	Config  string              // TOML
	Args    []string            // of "run", besides --config
	Stored  map[string]*os.File // the descriptors that an earlier daemon stored
}

// A Daemon is a running shaperd.
type Daemon struct {
	*Process
	Notify   *NotifySocket
	Config   string // path of its configuration
	Control  string // path of its control socket
	host     *Host
	stopping bool // whether it may exit
}

const (
	// startTimeout bounds the start and reloads: program verification is slow on a busy machine.
	startTimeout = 90 * time.Second

	// MetricsAddr is where a daemon must serve its metrics for [Daemon.Scrape].
	MetricsAddr = "127.0.0.1:9464"
)

// StartDaemon starts a daemon and waits until it is ready.
func StartDaemon(ctx context.Context, o DaemonOptions) (*Daemon, error) {
	// Not a test's own directory: its name may be too long for a socket's.
	dir, err := TempDir()
	if err != nil {
		return nil, err
	}
	d := &Daemon{host: o.Host, Config: filepath.Join(dir, "shaperd.toml"), Control: filepath.Join(dir, "control.sock")}
	err = d.start(o)
	if err == nil {
		err = d.Await(ctx, "READY=1")
	}
	if err != nil {
		d.stopping = true
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// start starts the process.
func (d *Daemon) start(o DaemonOptions) (err error) {
	if o.Binary == "" {
		if o.Binary, err = Binary(); err != nil {
			return err
		}
	}
	if err := d.WriteConfig(o.Config); err != nil {
		return err
	}
	if d.Notify, err = ListenNotify(filepath.Join(filepath.Dir(d.Config), "notify")); err != nil {
		return err
	}
	// The shell execs the daemon, so that LISTEN_PID is the daemon's.
	cmd := exec.Command("sh", slices.Concat([]string{"-c", `LISTEN_PID=$$ exec "$@"`, "sh"}, o.Wrapper, []string{o.Binary, "run", "--config", d.Config}, o.Args)...)
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+d.Notify.Path, "SHAPERD_CONTROL="+d.Control)
	if len(o.Stored) > 0 {
		var names []string
		for name, f := range o.Stored {
			names = append(names, name)
			cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		}
		cmd.Env = append(cmd.Env, fmt.Sprint("LISTEN_FDS=", len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	}
	start := Start
	if o.Host != nil {
		start = o.Host.Start
	}
	if d.Process, err = StartProcess(start, cmd); err != nil {
		return err
	}
	d.name = "shaperd"
	return nil
}

// WriteConfig replaces the configuration file.
func (d *Daemon) WriteConfig(text string) error {
	next := d.Config + ".next"
	if err := os.WriteFile(next, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(next, d.Config)
}

// Await waits for a notification that has a line that starts with want.
func (d *Daemon) Await(ctx context.Context, want string) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := d.Notify.Await(ctx, want, d.Exited()); err != nil {
		return d.Errorf("%w", err)
	}
	return nil
}

// Reload replaces the configuration, and waits until the reload succeeds or fails.
func (d *Daemon) Reload(ctx context.Context, config string) error {
	if err := d.WriteConfig(config); err != nil {
		return err
	}
	if err := d.Signal(unix.SIGHUP); err != nil {
		return err
	}
	if err := d.Await(ctx, "RELOADING=1"); err != nil {
		return err
	}
	return d.Await(ctx, "READY=1")
}

// Scrape returns the metrics.
func (d *Daemon) Scrape() (text string, err error) {
	scrape := func() error {
		text, err = testutil.Scrape(MetricsAddr)
		return err
	}
	if d.host != nil {
		return text, d.host.Do(scrape)
	}
	return text, scrape()
}

// Terminate sends SIGTERM.
func (d *Daemon) Terminate() error {
	d.stopping = true
	return d.Signal(unix.SIGTERM)
}

// Kill sends SIGKILL and waits for the exit.
func (d *Daemon) Kill() {
	d.stopping = true
	d.Process.Kill()
}

// Stop ends the daemon as a service manager would, and closes it. It returns an error if the
// daemon had exited, does not exit in time, or does not exit cleanly.
func (d *Daemon) Stop(limit time.Duration) error {
	if !d.Running() {
		return d.Close()
	}
	err := d.Terminate()
	if err == nil {
		err = d.AwaitExit(limit)
	}
	if err != nil {
		err = d.Errorf("after SIGTERM, %w", err)
	}
	return errors.Join(err, d.Close())
}

// Close kills the daemon and removes its directory. It returns an error if the daemon had exited
// unexpectedly, has crashed, or leaves a process.
func (d *Daemon) Close() error {
	var errs []error
	if d.Process != nil {
		if !d.Running() && !d.stopping {
			errs = append(errs, d.Errorf("it exited unexpectedly"))
		}
		d.Process.Kill()
		for _, bad := range []string{"panic:", "fatal error:", "DATA RACE"} {
			if strings.Contains(d.Log.String(), bad) {
				errs = append(errs, d.Errorf("it wrote %q", bad))
			}
		}
		if unix.Kill(-d.PID(), unix.SIGKILL) != unix.ESRCH {
			errs = append(errs, d.Errorf("it left a process"))
		}
	}
	if d.Notify != nil {
		d.Notify.Close()
	}
	return errors.Join(append(errs, os.RemoveAll(filepath.Dir(d.Config)))...)
}
