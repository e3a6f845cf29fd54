package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
	"golang.org/x/sys/unix"
)

// Text is a part of the configuration that stands in no file.
type Text struct {
	Name string // stands in errors, where the name of a file would
	TOML string
}

// Files is the text of a configuration's files, as they were read.
type Files struct {
	paths, texts []string
	ignored      []string
}

// Ignored returns the files in conf.d that have the suffix of other programs' configuration,
// and were not read.
func (f *Files) Ignored() []string { return f.ignored }

// Reader reads the files of a configuration. The zero value is ready to use.
type Reader struct {
	// Pipes lets the main file be a pipe or a terminal, such as /dev/stdin: reading it
	// waits for whoever writes.
	Pipes bool

	// Opening, unless nil, is called with each path before it is opened. A file system
	// that does not answer holds up Read for ever.
	Opening func(path string)
}

// Read reads the configuration at path, then every *.toml in a folder conf.d beside it, in
// the order of their names; hidden files are left out. The error is that of the operating
// system, or says that a file is not a regular one.
func (r *Reader) Read(path string) (*Files, error) {
	all := &Files{paths: []string{path}}
	folder := filepath.Join(filepath.Dir(path), "conf.d")
	r.opening(folder)
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".conf", ".cfg", ".ini", ".yaml", ".yml", ".json":
			all.ignored = append(all.ignored, filepath.Join(folder, e.Name()))
		}
		if strings.HasSuffix(e.Name(), ".toml") && !strings.HasPrefix(e.Name(), ".") {
			all.paths = append(all.paths, filepath.Join(folder, e.Name()))
		}
	}
	for i, path := range all.paths {
		r.opening(path)
		text, err := readFile(path, r.Pipes && i == 0)
		if err != nil {
			return nil, fmt.Errorf("read configuration: %w", err)
		}
		all.texts = append(all.texts, text)
	}
	return all, nil
}

func (r *Reader) opening(path string) {
	if r.Opening != nil {
		r.Opening(path)
	}
}

// Read is [Reader.Read] of regular files.
func Read(path string) (*Files, error) { return new(Reader).Read(path) }

// All returns the paths of f and their texts, the main file first.
func (f *Files) All() iter.Seq2[string, string] {
	return func(yield func(path, text string) bool) {
		for i, path := range f.paths {
			if !yield(path, f.texts[i]) {
				return
			}
		}
	}
}

// With returns f with text in the file at path, or without that file where text is "". The
// path is that of a file of the folder conf.d, as [Read] would name it.
func (f *Files) With(path, text string) *Files {
	with := &Files{paths: slices.Clone(f.paths), texts: slices.Clone(f.texts), ignored: f.ignored}
	i, found := slices.BinarySearch(with.paths[1:], path)
	i++ // the main file is the first
	if found {
		with.paths, with.texts = slices.Delete(with.paths, i, i+1), slices.Delete(with.texts, i, i+1)
	}
	if text != "" {
		with.paths, with.texts = slices.Insert(with.paths, i, path), slices.Insert(with.texts, i, text)
	}
	return with
}

// Load makes a configuration of f, and of what is added to it. The listeners, attachments,
// limits and ASN files of all of them add up.
//
// What is added may override what an override in a file does.
//
// The error is an [Errors]. The data files that the configuration names are not opened.
func (f *Files) Load(added ...Text) (*Config, error) {
	var files []*file
	for i, path := range f.paths {
		files = append(files, newFile(path, i, f.texts[i]))
	}
	for _, text := range added {
		a := newFile(text.Name, len(files), text.TOML)
		a.runtime = true
		files = append(files, a)
	}
	return load(files)
}

// Load is [Read], and [Files.Load] of what was read.
func Load(path string, added ...Text) (*Config, error) {
	f, err := Read(path)
	if err != nil {
		return nil, err
	}
	return f.Load(added...)
}

// readFile reads at most one byte more than a file may have. It does not wait for the
// writer of a pipe, unless pipes may be read.
func readFile(path string, pipes bool) (string, error) {
	flags := os.O_RDONLY
	if !pipes {
		flags |= unix.O_NONBLOCK
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() && !pipes {
		return "", fmt.Errorf("%s: not a regular file (%s)", path, info.Mode())
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	return string(text), err
}

// load makes a configuration of files, the main one first.
func load(files []*file) (*Config, error) {
	l := loader{
		c: &Config{
			Daemon:      Daemon{Metrics: "127.0.0.1:9464", Page: "127.0.0.1:9465", Buckets: 1 << 20, Pins: "/sys/fs/bpf/shaperd"},
			Transparent: Transparent{Mark: 21320},
			overridden:  map[string]map[string]string{},
		},
		set:       map[string]*node{},
		asnFiles:  map[string]*node{},
		overrides: map[string]map[string]overrideValue{},
	}
	var tables []table
	for _, f := range files {
		root, values := l.parse(f)
		if values == nil {
			continue
		}
		l.hasPlaces = l.hasPlaces || values["listen"] != nil || values["attach"] != nil
		t := table{&l.report, "", fileKeys, values, root}
		tables = append(tables, t)
		for _, o := range t.tables("override") {
			l.override(o)
		}
	}
	for _, t := range tables {
		l.file(t)
	}
	if !l.syntaxErrors {
		l.check(&node{file: files[0]})
	}
	if err := l.errors(); err != nil {
		return nil, err
	}
	return l.c, nil
}

// parse returns the values of f and where they stand, or nil when it has a
// syntax error.
func (l *loader) parse(f *file) (*node, map[string]any) {
	root, refused := scan(f)
	if len(f.text) > maxFile {
		refused = &mistake{root, "the file is larger than 4 MiB"}
	}
	var values map[string]any
	if refused == nil {
		refused = syntax(root, decode(f.text, &values))
	}
	if refused != nil {
		l.add(refused.at, refused.msg)
		l.syntaxErrors = true
		return nil, nil
	}
	return root, values
}

// decode is toml.Decode without its panics. It panics where it finds itself
// inconsistent ("BUG: ..."); a bad file must not end a daemon that reloads it.
func decode(text string, v any) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the TOML parser failed: %v", r)
		}
	}()
	_, err = toml.Decode(text, v)
	return err
}

// syntax places a decoder's error in the file of root.
func syntax(root *node, err error) *mistake {
	if err == nil {
		return nil
	}
	var parse toml.ParseError
	if !errors.As(err, &parse) {
		return &mistake{root, err.Error()}
	}
	// The decoder's lines are off by one at line ends; its offsets are right.
	offset := min(max(parse.Position.Start, 0), len(root.file.text))
	return &mistake{&node{file: root.file, offset: offset}, "TOML syntax: " + clip(parse.Message, 200) + quoteHint(root.file.text, offset) + firstDefinition(root, parse.Message, offset)}
}

// firstDefinition says where the key stands first that stands at offset again, if that is what message
// says.
func firstDefinition(root *node, message string, offset int) string {
	path, again := strings.CutSuffix(message, "' has already been defined.")
	path, named := strings.CutPrefix(path, "Key '")
	if !again || !named {
		return ""
	}
	n := root
	for name := range strings.SplitSeq(path, ".") {
		for len(n.elems) > 0 {
			n = n.elems[len(n.elems)-1]
		}
		if n = n.keys[name]; n == nil {
			return ""
		}
	}
	if n.offset >= offset {
		return ""
	}
	return fmt.Sprintf(" First in line %d.", n.line())
}

// quoteHint says what to write where the line at offset has a value with a unit that stands
// in no quotes.
func quoteHint(text string, offset int) string {
	line := text[strings.LastIndexByte(text[:offset], '\n')+1:]
	line, _, _ = strings.Cut(line, "\n")
	_, value, _ := strings.Cut(line, "=")
	value, _, _ = strings.Cut(value, "#")
	value = strings.TrimSpace(value)
	if number := strings.TrimLeft(value, "0123456789."); number == value || strings.ContainsAny(value, "\"'[]{},") || strings.Trim(value, "0123456789.") == "" {
		return ""
	}
	return "; a value with a unit needs quotes: write " + quote(value)
}
