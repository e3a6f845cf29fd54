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

// Files has the texts of the files of a configuration.
type Files struct {
	paths, texts []string
	ignored      []string
}

// Ignored returns the files in conf.d that were not read, but have a suffix that other
// programs use for configuration.
func (f *Files) Ignored() []string { return f.ignored }

// Reader reads the files of a configuration. The zero value is ready to use.
type Reader struct {
	// Pipes permits a main file that is a pipe or a terminal, such as /dev/stdin: Read
	// blocks until the writer is done.
	Pipes bool

	// Opening, unless nil, is called with each path before it is opened. A file system
	// that does not respond blocks Read forever.
	Opening func(path string)
}

// Read reads the configuration at path, then every *.toml in a folder conf.d next to it, in
// the order of their names, except hidden files. The error is that of the operating system,
// or that a file is not a regular file.
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

// Read reads a configuration as [Reader.Read] does, from regular files only.
func Read(path string) (*Files, error) { return new(Reader).Read(path) }

// Add adds a file that was read: first the main one, then those in conf.d, in the order of their names.
func (f *Files) Add(path, text string) {
	f.paths, f.texts = append(f.paths, path), append(f.texts, text)
}

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

// With returns a copy of f with text as the file at path, or without that file if text is
// "". The path is that of a file in the folder conf.d, as [Read] names it.
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

// Load parses and checks f. Listeners, attachments, limits and ASN files of all files add up.
//
// The error is an [Errors]. Data files that the configuration names are not opened.
func (f *Files) Load() (*Config, error) {
	var files []*file
	for i, path := range f.paths {
		files = append(files, newFile(path, i, f.texts[i]))
	}
	return load(files)
}

// Load reads the configuration at path, as [Read] does, and loads it, as [Files.Load] does.
func Load(path string) (*Config, error) {
	f, err := Read(path)
	if err != nil {
		return nil, err
	}
	return f.Load()
}

// readFile reads at most one byte beyond the maximum size of a file. It does not block on a
// pipe, unless pipes are permitted.
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

// parsedFile has the values of a file and their positions. Loading does not change them.
type parsedFile struct {
	root   *node
	values map[string]any
}

// load parses and checks files, the main one first.
func load(files []*file) (*Config, error) {
	l := newLoader()
	for _, f := range files {
		if root, values := l.parse(f); values != nil {
			l.c.files = append(l.c.files, parsedFile{root, values})
		}
	}
	c, err := l.load(&node{file: files[0]}, nil)
	if err != nil {
		return nil, err
	}
	if err := c.checkSchedules(); err != nil {
		return nil, err
	}
	return c, nil
}

// With returns the configuration with some of its overrides with a schedule, which are bits as in [Config.ActiveAt], and with overrides,
// in place of those that c has. It does not read or parse files again. The error is an [Errors], or that of a value without a position.
func (c *Config) With(active uint64, overrides ...Override) (*Config, error) {
	for i := range overrides {
		if err := overrides[i].check(); err != nil {
			return nil, err
		}
	}
	l := newLoader()
	l.c.files, l.c.active = c.files, active
	return l.load(&node{file: c.files[0].root.file}, overrides)
}

func newLoader() *loader {
	l := &loader{
		c:         &Config{overridden: map[string]map[string]string{}},
		set:       map[string]*node{},
		asnFiles:  map[string]*node{},
		overrides: map[string]map[string]locatedValue{},
	}
	fileKeys.setDefaults(l.c)
	listenKeys.setDefaults(&l.newListen)
	attachKeys.setDefaults(&l.newAttach)
	limitKeys.setDefaults(&l.newLimit)
	penaltyKeys.setDefaults(&l.newPenalty)
	return l
}

// load decodes and checks the parsed files with overrides. main is the root of the main file.
func (l *loader) load(main *node, overrides []Override) (*Config, error) {
	var tables []table
	for _, f := range l.c.files {
		l.hasPlaces = l.hasPlaces || f.values["listen"] != nil || f.values["attach"] != nil
		t := table{&l.report, "", fileKeys, f.values, f.root}
		tables = append(tables, t)
		for _, o := range t.tables("override") {
			l.fileOverride(o)
		}
	}
	l.applySchedules()
	for i, o := range overrides {
		l.override(o, len(tables)+i)
	}
	for _, t := range tables {
		l.file(t)
	}
	if !l.syntaxErrors {
		l.check(main)
		l.sourceOverrides()
	}
	if err := l.errors(); err != nil {
		return nil, err
	}
	return l.c, nil
}

// parse returns the positions and the values of f, or nil when it has a syntax error.
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

// decode calls toml.Decode, and returns its panics as errors. It panics on internal
// inconsistencies ("BUG: ..."); a bad file must not end a daemon that reloads it.
func decode(text string, v any) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the TOML parser failed: %v", r)
		}
	}()
	_, err = toml.Decode(text, v)
	return err
}

// syntax returns an error of the decoder with its position in the file of root.
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

// firstDefinition returns a hint at the first definition of the key at offset, if message is
// that it is a duplicate.
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

// quoteHint returns a hint if the line at offset has a value with a unit but without quotes.
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
