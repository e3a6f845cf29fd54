package plan

import (
	"errors"

	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/config"
)

// Load loads a configuration for a verb: its main file may be a pipe.
func Load(path string) (*Plan, error) {
	return Read(&config.Reader{Pipes: true}, path)
}

// Read reads and loads a configuration. It stays in a system call while the file system of a file does
// not answer.
func Read(r *config.Reader, path string) (*Plan, error) {
	files, err := r.Read(path)
	if err != nil {
		return nil, err
	}
	return LoadFiles(files, r.Opening)
}

// LoadFiles loads files that were read, and what they refer to. It calls opening, unless that is nil,
// as [config.Reader] does.
func LoadFiles(files *config.Files, opening func(path string)) (*Plan, error) {
	files, old := migrateSaved(files)
	c, err := files.Load()
	if err != nil {
		return nil, err
	}
	p := newPlan(files, c)
	p.old, p.revision = old, revisionOf(c)
	if len(c.ASN.Files) > 0 {
		if opening != nil {
			opening("the files of [asn]")
		}
		load := asn.Load
		if c.NeedsCountries() {
			load = asn.LoadCountries
		}
		if p.asns, err = load(c.ASN.Files...); err != nil {
			return nil, c.ASNError(err)
		}
	}
	if p.data, err = readData(c, opening); err != nil {
		return nil, err
	}
	if err := p.fill(); err != nil {
		return nil, err
	}
	return p, p.checkSchedules()
}

// Errors returns the errors of loading the configuration at path, one by one. One that
// is not of a place in a file has no line.
func Errors(path string, err error) config.Errors {
	var all config.Errors
	var one *config.Error
	switch {
	case errors.As(err, &all):
		return all
	case errors.As(err, &one):
		return config.Errors{one}
	}
	return config.Errors{{File: path, Msg: err.Error()}}
}
