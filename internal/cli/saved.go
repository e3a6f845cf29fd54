package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/internal/safefile"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// savedFile is the file in conf.d to which "set limit --save" writes the overrides of one limit.
//
// Root writes it, for a daemon that must not become root. So neither its path, which comes from
// --config, nor its contents depend on an answer of the daemon.
type savedFile struct {
	config, limit string
	configDir     *os.File           // folder of config
	confD         *os.File           // conf.d in configDir; nil while there is none
	owner         safefile.Ownership // of config
	original      string             // text of the file when it was opened; "" when there was none
	current       string             // text after the last write
	set           map[string]string
}

// openSavedFile opens the file of a limit of the configuration at path. The file may be absent.
func openSavedFile(path, limit string) (_ *savedFile, err error) {
	if path, err = filepath.Abs(path); err != nil {
		return nil, err
	}
	if strings.ContainsRune(limit, '/') {
		return nil, usageError{fmt.Errorf("invalid limit name %q", limit)}
	}
	s := &savedFile{config: path, limit: limit, set: map[string]string{}}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.configDir, err = safefile.OpenTrusted(filepath.Dir(path)); err != nil {
		return nil, err
	}
	if _, s.owner, err = safefile.ReadTrusted(s.configDir, filepath.Base(path), maxTextSize); err != nil {
		return nil, err
	}
	s.confD, err = safefile.OpenTrusted(filepath.Dir(s.path()))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	if s.original, err = s.read(); s.original == "" || err != nil {
		return s, err
	}
	s.current = s.original
	var ours bool
	if s.set, ours = plan.ParseSaved(s.limit, s.original); !ours {
		return nil, fmt.Errorf("%s was edited; move its contents to another file in conf.d, or they would be lost", s.path())
	}
	return s, nil
}

const maxTextSize = 4 << 20 // bytes

// read returns the text of the file, or "" when there is none.
func (s *savedFile) read() (string, error) {
	text, _, err := safefile.ReadTrusted(s.confD, filepath.Base(s.path()), maxTextSize)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return string(text), err
}

func (s *savedFile) close() {
	s.configDir.Close() // closing a nil file is harmless
	s.confD.Close()
}

func (s *savedFile) path() string { return plan.SavedPath(s.config, s.limit) }

// textWith returns the text of the file with overrides added.
func (s *savedFile) textWith(set map[string]string) (string, error) {
	all := maps.Clone(s.set)
	maps.Copy(all, set)
	return plan.FormatSaved(s.limit, all)
}

// check returns an error when the whole configuration would not load with text in the file, or,
// when text is "", without the file.
func (s *savedFile) check(text string) error {
	files, err := config.Read(s.config)
	if err != nil {
		return err
	}
	l, err := plan.LoadFiles(files.With(s.path(), text), nil)
	if err != nil {
		return err
	}
	_, err = l.Compile(shaper.New(1))
	return err
}

// write writes text to the file, or removes the file when text is "".
func (s *savedFile) write(text string) (err error) {
	name := filepath.Base(s.path())
	if text == "" {
		if err := unix.Unlinkat(int(s.confD.Fd()), name, 0); err != nil {
			return &fs.PathError{Op: "remove", Path: s.path(), Err: err}
		}
		s.current = ""
		return s.confD.Sync()
	}
	if s.confD == nil {
		if err := s.makeConfD(); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				_ = unix.Unlinkat(int(s.configDir.Fd()), "conf.d", unix.AT_REMOVEDIR)
			}
		}()
	}
	err = safefile.Write(s.confD, name, []byte(text), s.owner, func() error {
		if now, err := s.read(); err != nil || now != s.current {
			return errors.Join(fmt.Errorf("%s has changed in the meantime; try again", s.path()), err)
		}
		return nil
	})
	if err == nil {
		s.current = text
	}
	return err
}

// makeConfD makes conf.d with the mode and owner of its parent.
func (s *savedFile) makeConfD() error {
	var parent unix.Stat_t
	at := int(s.configDir.Fd())
	err := unix.Fstat(at, &parent)
	if err == nil {
		err = unix.Mkdirat(at, "conf.d", 0o700)
	}
	if errors.Is(err, unix.EEXIST) { // made by another process that saves
		s.confD, err = safefile.OpenTrusted(filepath.Dir(s.path()))
		return err
	}
	if err == nil {
		s.confD, err = safefile.OpenFolder(s.configDir, "conf.d")
	}
	if err == nil {
		err = safefile.OwnershipOf(&parent).ApplyTo(int(s.confD.Fd()))
	}
	if err == nil {
		err = s.configDir.Sync()
	}
	if err != nil {
		return fmt.Errorf("make %s: %w", filepath.Dir(s.path()), err)
	}
	return nil
}

// replace writes text to the file and reloads the daemon. When a step fails, it restores the
// file.
func (s *savedFile) replace(ctx context.Context, c *api.Client, text string) error {
	if err := s.check(text); err != nil {
		return fmt.Errorf("nothing changed: the configuration would not load:\n%w", err)
	}
	if err := s.write(text); err != nil {
		return fmt.Errorf("nothing changed: %w", err)
	}
	r, err := c.Reload(ctx)
	if err == nil && !r.OK {
		err = errors.New(api.Printable(strings.Join(r.Errors, "\n")))
	}
	if err == nil {
		return nil
	}
	if back := s.write(s.original); back != nil {
		return fmt.Errorf("%s was written but is not effective: the daemon rejected it: %w\nrestoring the file failed: %w", s.path(), err, back)
	}
	return fmt.Errorf("nothing changed: the daemon rejected the configuration: %w", err)
}

// openSavedFile opens the file of a limit of the daemon that runs with the configuration at
// path. The daemon must run as root, as this user or as the user of the service: nobody else may
// cause root to write files.
func (e env) openSavedFile(ctx context.Context, c *api.Client, path, limit string) (*savedFile, error) {
	uid, err := c.Peer(ctx)
	if err != nil {
		return nil, err
	}
	service, _ := user.Lookup(control.Group) // the user has the same name
	if uid != 0 && int(uid) != os.Geteuid() && (service == nil || service.Uid != strconv.Itoa(int(uid))) {
		return nil, fmt.Errorf("the daemon at %s runs as user %d, neither root nor %q: refusing to write its configuration", e.flags.control, uid, control.Group)
	}
	s, err := openSavedFile(path, limit)
	if err != nil {
		return nil, err
	}
	status, err := c.Status(ctx)
	if err == nil && status.Config != s.config {
		err = usageError{fmt.Errorf("the daemon runs with %s, but --config is %s", api.Printable(status.Config), s.config)}
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// saveLimit writes overrides of a limit to its file, and reloads.
func saveLimit(ctx context.Context, e env, path, name string, set map[string]string) error {
	c := e.client()
	was, err := c.Limit(ctx, name)
	if err != nil {
		return limitError(ctx, c, name, err)
	}
	s, err := e.openSavedFile(ctx, c, path, name)
	if err != nil {
		return err
	}
	defer s.close()
	text, err := s.textWith(set)
	if err != nil {
		return usageError{err}
	}
	if err := s.replace(ctx, c, text); err != nil {
		return err
	}
	// Runtime overrides would take precedence.
	is, err := c.Limit(ctx, name)
	for key := range set {
		if err == nil && is.Override[key] != "" {
			is, err = c.UnsetLimit(ctx, name, "", key)
		}
	}
	if err != nil {
		return fmt.Errorf("saved in %s, but possibly not effective: %w", s.path(), err)
	}
	return e.show(is, func(p *term.Printer) {
		printLimitChange(p, was, is)
		p.Line("set  %s, saved in %s", formatOverrides(set), s.path())
	})
}

// unsaveLimit removes the file of a limit, which may no longer exist.
func unsaveLimit(ctx context.Context, e env, path, name string) error {
	c := e.client()
	s, err := e.openSavedFile(ctx, c, path, name)
	if err != nil {
		return err
	}
	defer s.close()
	was, err := c.Limit(ctx, name)
	switch {
	case s.original != "":
	case err != nil:
		return limitError(ctx, c, name, err)
	default:
		return usageError{fmt.Errorf("limit %q has no saved overrides: %s does not exist", name, s.path())}
	}
	if err := s.replace(ctx, c, ""); err != nil {
		return err
	}
	is, gone := c.Limit(ctx, name)
	return e.show(is, func(p *term.Printer) {
		if err == nil && gone == nil {
			printLimitChange(p, was, is)
		}
		p.Line("removed %s", s.path())
		printRemainingOverrides(p, is)
	})
}
