package plan

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// Data has the contents of the files with sources that a configuration names: those of groups, and those with values of limits.
// It is not modified.
type Data struct {
	files map[string]dataFile // by path
}

// dataFile is a file as it was read.
type dataFile struct {
	version  fileVersion
	prefixes []netip.Prefix       // if a group names it
	values   *config.SourceValues // if a limit names it
}

// fileVersion changes when a file does. It is comparable.
type fileVersion struct {
	device, inode uint64
	size          int64
	changed       syscall.Timespec
}

// kinds returns what the files are that c names, by path.
func kinds(c *config.Config) map[string]dataKind {
	all := map[string]dataKind{}
	for _, g := range c.Groups {
		if g.File != "" {
			all[g.File] |= ofGroup
		}
	}
	for i := range c.Limits {
		if path := c.Limits[i].ValuesFile; path != "" {
			all[path] |= withValues
		}
	}
	return all
}

type dataKind uint8

const (
	ofGroup dataKind = 1 << iota
	withValues
)

// readData reads the files that c names.
func readData(c *config.Config, opening func(path string)) (*Data, error) {
	d := &Data{files: map[string]dataFile{}}
	of := kinds(c)
	var mistakes config.Errors
	for _, path := range slices.Sorted(maps.Keys(of)) {
		if opening != nil {
			opening(path)
		}
		f, err := readDataFile(path, of[path])
		var all config.Errors
		switch {
		case errors.As(err, &all):
			mistakes = append(mistakes, all...)
		case err != nil:
			mistakes = append(mistakes, c.SourceFileError(path, err))
		default:
			d.files[path] = f
		}
	}
	if len(mistakes) > 0 {
		return nil, mistakes
	}
	return d, nil
}

func readDataFile(path string, kind dataKind) (f dataFile, err error) {
	in, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return f, err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return f, err
	}
	if !info.Mode().IsRegular() {
		return f, fmt.Errorf("%s: not a regular file (%s)", path, info.Mode())
	}
	f.version = versionOf(info)
	text, err := io.ReadAll(io.LimitReader(in, config.MaxSourceFile+1))
	switch {
	case err != nil:
		return f, err
	case len(text) > config.MaxSourceFile:
		return f, fmt.Errorf("%s: larger than %d MiB", path, config.MaxSourceFile>>20)
	}
	if kind&ofGroup != 0 {
		if f.prefixes, err = config.ParseGroup(path, string(text)); err != nil {
			return f, err
		}
	}
	if kind&withValues != 0 {
		f.values, err = config.ParseValues(path, string(text))
	}
	return f, err
}

func versionOf(info os.FileInfo) fileVersion {
	s := info.Sys().(*syscall.Stat_t)
	return fileVersion{device: s.Dev, inode: s.Ino, size: s.Size, changed: s.Ctim}
}

// Versions returns the versions of the files with sources that p names, by path, as text: one changes when the file does, or cannot be
// reached. It stays in a system call while their file system does not answer.
func (p *Plan) Versions() map[string]string {
	all := map[string]string{}
	for path := range kinds(p.Config) {
		if info, err := os.Stat(path); err != nil {
			all[path] = err.Error()
		} else {
			all[path] = fmt.Sprint(versionOf(info))
		}
	}
	return all
}

// ReadVersion returns the version of a file with sources when it was read, see [Plan.Versions].
func (p *Plan) ReadVersion(path string) string { return fmt.Sprint(p.data.files[path].version) }

// Reread returns p with one of its files with sources as it is now. The error is a [config.Errors], or that the file cannot be read.
func (p *Plan) Reread(path string) (*Plan, error) {
	f, err := readDataFile(path, kinds(p.Config)[path])
	if err != nil {
		return nil, err
	}
	c := *p
	c.data = &Data{files: maps.Clone(p.data.files)}
	c.data.files[path] = f
	if err := c.fill(); err != nil {
		return nil, err
	}
	return &c, c.checkSchedules()
}

// fill computes the values of sources under the limits of p.
func (p *Plan) fill() error {
	p.bySource = nil
	for i := range p.Config.Limits {
		l := &p.Config.Limits[i]
		values, err := p.values(l)
		if err != nil {
			return err
		}
		p.bySource = append(p.bySource, slices.Concat(values, l.BySource)) // those of operators decide
	}
	return nil
}

// values returns the values of sources that the file of a limit of p has.
func (p *Plan) values(l *shaper.Limit) ([]shaper.SourceValues, error) {
	if l.ValuesFile == "" {
		return nil, nil
	}
	return p.data.files[l.ValuesFile].values.For(l)
}

// groups returns the groups of p with the sources in their files.
func (p *Plan) groups() (all []shaper.Group) {
	for _, g := range p.Config.Groups {
		if g.File != "" {
			g.Source = slices.Concat(g.Source, p.data.files[g.File].prefixes)
		}
		all = append(all, g.Group)
	}
	return all
}

// limits returns the limits of p with the values of sources.
func (p *Plan) limits() []shaper.Limit {
	all := slices.Clone(p.Config.Limits)
	for i := range all {
		all[i].BySource = p.bySource[i]
	}
	return slices.Concat(all, p.blocks)
}
