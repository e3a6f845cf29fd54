package main

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

	"shaperd/control"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

// defaultConfig is the configuration of the daemon, unless told otherwise.
const defaultConfig = "/etc/shaperd/shaperd.toml"

// saved is the file in conf.d in which "set limit --save" keeps what it sets in one limit.
//
// Root writes it, for a daemon that is not to become root. So nothing of it is what the
// daemon says: neither where it is, which --config tells, nor what it holds.
type saved struct {
	config, limit string
	beside        *os.File // the folder of config
	folder        *os.File // conf.d there, nil while there is none
	like          owned    // what config is
	was           string   // the text; "" when there is no such file
	now           string   // the same, once it was put
	set           map[string]string
}

// openSaved opens the file of a limit in the configuration at path, if there is one.
func openSaved(path, limit string) (_ *saved, err error) {
	if path, err = filepath.Abs(path); err != nil {
		return nil, err
	}
	if strings.ContainsRune(limit, '/') {
		return nil, usageError{fmt.Errorf("%q is not the name of a limit", limit)}
	}
	s := &saved{config: path, limit: limit, set: map[string]string{}}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.beside, err = trustedFolder(filepath.Dir(path)); err != nil {
		return nil, err
	}
	if _, s.like, err = readTrusted(s.beside, filepath.Base(path), mostText); err != nil {
		return nil, err
	}
	s.folder, err = trustedFolder(filepath.Dir(s.path()))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	if s.was, err = s.read(); s.was == "" || err != nil {
		return s, err
	}
	s.now = s.was
	var ours bool
	if s.set, ours = s.parse(s.was); !ours {
		return nil, fmt.Errorf("%s was edited, and would be lost: move what is in it to another file of conf.d", s.path())
	}
	return s, nil
}

const mostText = 4 << 20 // bytes

// read returns the text of the file, "" when there is none.
func (s *saved) read() (string, error) {
	text, _, err := readTrusted(s.folder, filepath.Base(s.path()), mostText)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return string(text), err
}

func (s *saved) close() {
	s.beside.Close() // a nil one is closed
	s.folder.Close()
}

func (s *saved) path() string {
	return filepath.Join(filepath.Dir(s.config), "conf.d", savedPrefix+s.limit+".toml")
}

const savedPrefix = "90-set-"

func (s *saved) header() string {
	return fmt.Sprintf("# Written by \"shaperd set limit --save\": do not edit it. \"shaperd unset limit %s --saved\" removes it.\n", s.limit)
}

// parse returns what is set in a text of the file, and whether nothing else is in it.
func (s *saved) parse(text string) (set map[string]string, ok bool) {
	override, ok := strings.CutPrefix(text, s.header())
	set, err := config.ParseOverride(s.limit, override)
	return set, ok && err == nil
}

// migrateSaved returns files with the current keys in what an earlier version saved, and the
// paths of those. The daemon cannot write them, and nobody is to edit them.
func migrateSaved(files *config.Files) (migrated *config.Files, old []string) {
	migrated = files
	for path, text := range files.All() {
		limit, ok := strings.CutPrefix(strings.TrimSuffix(filepath.Base(path), ".toml"), savedPrefix)
		if !ok || filepath.Base(filepath.Dir(path)) != "conf.d" {
			continue
		}
		s := &saved{limit: limit}
		set, ok := s.parse(text)
		if !ok {
			continue
		}
		s.set = set
		if now, err := s.add(nil); err == nil && now != text {
			migrated = migrated.With(path, now)
			old = append(old, path)
		}
	}
	return migrated, old
}

// add returns the text of the file with more keys set.
func (s *saved) add(set map[string]string) (string, error) {
	all := maps.Clone(s.set)
	maps.Copy(all, set)
	text, err := config.FormatOverride(s.limit, all)
	return s.header() + text, err
}

// check returns an error when the whole configuration would not load with another text in
// the file, or without it where text is "".
func (s *saved) check(text string) error {
	files, err := config.Read(s.config)
	if err != nil {
		return err
	}
	l, err := loadFiles(files.With(s.path(), text), nil)
	if err != nil {
		return err
	}
	_, err = l.compile(shaper.New(1))
	return err
}

// put writes the file, or removes it where text is "".
func (s *saved) put(text string) (err error) {
	name := filepath.Base(s.path())
	if text == "" {
		if err := unix.Unlinkat(int(s.folder.Fd()), name, 0); err != nil {
			return &fs.PathError{Op: "remove", Path: s.path(), Err: err}
		}
		s.now = ""
		return s.folder.Sync()
	}
	if s.folder == nil {
		if err := s.makeFolder(); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				_ = unix.Unlinkat(int(s.beside.Fd()), "conf.d", unix.AT_REMOVEDIR)
			}
		}()
	}
	err = writeWhole(s.folder, name, []byte(text), s.like, func() error {
		if now, err := s.read(); err != nil || now != s.now {
			return errors.Join(fmt.Errorf("%s was changed meanwhile: try again", s.path()), err)
		}
		return nil
	})
	if err == nil {
		s.now = text
	}
	return err
}

// makeFolder makes conf.d as the folder that it is in.
func (s *saved) makeFolder() error {
	var like unix.Stat_t
	at := int(s.beside.Fd())
	err := unix.Fstat(at, &like)
	if err == nil {
		err = unix.Mkdirat(at, "conf.d", 0o700)
	}
	if errors.Is(err, unix.EEXIST) { // of another one who saves
		s.folder, err = trustedFolder(filepath.Dir(s.path()))
		return err
	}
	if err == nil {
		s.folder, err = openFolder(s.beside, "conf.d")
	}
	if err == nil {
		err = ownedBy(&like).give(int(s.folder.Fd()))
	}
	if err == nil {
		err = s.beside.Sync()
	}
	if err != nil {
		return fmt.Errorf("make %s: %w", filepath.Dir(s.path()), err)
	}
	return nil
}

// replace puts another text in the place of what is saved, and has the daemon load it: all
// of that, or nothing.
func (s *saved) replace(ctx context.Context, c *control.Client, text string) error {
	if err := s.check(text); err != nil {
		return fmt.Errorf("nothing is changed, as the configuration would not load:\n%w", err)
	}
	if err := s.put(text); err != nil {
		return fmt.Errorf("nothing is changed: %w", err)
	}
	r, err := c.Reload(ctx)
	if err == nil && !r.OK {
		err = errors.New(printable(strings.Join(r.Errors, "\n")))
	}
	if err == nil {
		return nil
	}
	if back := s.put(s.was); back != nil {
		return fmt.Errorf("%s is changed and not effective: the daemon did not load it: %w\n%w", s.path(), err, back)
	}
	return fmt.Errorf("nothing is changed, as the daemon did not load it: %w", err)
}

// openSaved opens what is saved of a limit of the daemon that runs by the configuration at
// path. That is root's, or the service's: nobody else has it that root writes files.
func (e env) openSaved(ctx context.Context, c *control.Client, path, limit string) (*saved, error) {
	uid, err := c.Peer(ctx)
	if err != nil {
		return nil, err
	}
	service, _ := user.Lookup(control.Group) // of that name too
	if uid != 0 && int(uid) != os.Geteuid() && (service == nil || service.Uid != strconv.Itoa(int(uid))) {
		return nil, fmt.Errorf("the daemon at %s is of user %d, who is neither root nor %q: nothing is saved for it", e.flags.control, uid, control.Group)
	}
	s, err := openSaved(path, limit)
	if err != nil {
		return nil, err
	}
	status, err := c.Status(ctx)
	if err == nil && status.Config != s.config {
		err = usageError{fmt.Errorf("the daemon runs by %s, and --config is %s", printable(status.Config), s.config)}
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// saveLimit sets keys of a limit for good.
func saveLimit(ctx context.Context, e env, path, name string, set map[string]string) error {
	c := e.daemon()
	was, err := c.Limit(ctx, name)
	if err != nil {
		return ofLimit(ctx, c, name, err)
	}
	s, err := e.openSaved(ctx, c, path, name)
	if err != nil {
		return err
	}
	defer s.close()
	text, err := s.add(set)
	if err != nil {
		return usageError{err}
	}
	if err := s.replace(ctx, c, text); err != nil {
		return err
	}
	// What was set in memory would go before it.
	is, err := c.Limit(ctx, name)
	for key := range set {
		if err == nil && is.Override[key] != "" {
			is, err = c.UnsetLimit(ctx, name, key)
		}
	}
	if err != nil {
		return fmt.Errorf("saved in %s, and maybe not effective: %w", s.path(), err)
	}
	return e.show(is, func(p *page) {
		p.change(was, is)
		p.line("set  %s, saved in %s", settings(set), s.path())
	})
}

// unsaveLimit takes back what was saved of a limit, which may be one that is not there any more.
func unsaveLimit(ctx context.Context, e env, path, name string) error {
	c := e.daemon()
	s, err := e.openSaved(ctx, c, path, name)
	if err != nil {
		return err
	}
	defer s.close()
	was, err := c.Limit(ctx, name)
	switch {
	case s.was != "":
	case err != nil:
		return ofLimit(ctx, c, name, err)
	default:
		return usageError{fmt.Errorf("nothing is saved of limit %q: there is no %s", name, s.path())}
	}
	if err := s.replace(ctx, c, ""); err != nil {
		return err
	}
	is, gone := c.Limit(ctx, name)
	return e.show(is, func(p *page) {
		if err == nil && gone == nil {
			p.change(was, is)
		}
		p.line("removed %s", s.path())
		p.overrides(is)
	})
}
