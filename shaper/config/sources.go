package config

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// Bounds of the files with sources that a configuration names.
const (
	MaxSourceFile  = 32 << 20 // bytes
	maxSourceLines = 200_000
)

// ParseGroup parses the text of the file of a group: an address or a prefix in each line, and comments after "#". The error is an
// [Errors].
func ParseGroup(path, text string) ([]netip.Prefix, error) {
	r := sourceFile{path: path}
	var all []netip.Prefix
	n := 0
	for line := range strings.Lines(text) {
		n++
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		p, err := parsePrefix(line)
		switch {
		case err != nil:
			r.add(n, 1, err)
		case len(all) == maxSourceLines:
			r.add(n, 1, fmt.Errorf("too many prefixes: at most %d", maxSourceLines))
			return nil, r.errors
		default:
			all = append(all, p)
		}
		if r.full() {
			break
		}
	}
	return all, r.result()
}

// sourceFile collects mistakes in a file with sources.
type sourceFile struct {
	path   string
	errors Errors
}

func (r *sourceFile) add(line, column int, err error) {
	r.errors = append(r.errors, &Error{File: r.path, Line: line, Column: column, Msg: err.Error()})
}

func (r *sourceFile) full() bool { return len(r.errors) >= maxMistakes }

func (r *sourceFile) result() error {
	if len(r.errors) == 0 {
		return nil
	}
	return r.errors
}

// SourceValues is the content of the file that values of a limit names.
type SourceValues struct {
	path    string
	columns []*key // after that of sources
	rows    []valuesRow
	cells   []any // the values of all rows, nil where the limit's own counts
}

type valuesRow struct {
	source netip.Prefix
	line   int
}

// ParseValues parses the text of a file with values, as CSV: a header that begins with "source", and names keys of for; then a line
// for each source. Lines that begin with "#" are comments. The error is an [Errors].
func ParseValues(path, text string) (*SourceValues, error) {
	r := sourceFile{path: path}
	in := csv.NewReader(strings.NewReader(text))
	in.Comment, in.ReuseRecord, in.TrimLeadingSpace, in.FieldsPerRecord = '#', true, true, -1
	header, err := in.Read()
	if err != nil {
		r.addCSV(err)
		return nil, r.errors
	}
	v := &SourceValues{path: path}
	if strings.TrimSpace(header[0]) != "source" {
		r.add(1, 1, fmt.Errorf("the first column is %s: must be source, in a header such as source,rate,max_connections", quote(header[0])))
		return nil, r.errors
	}
	for i, name := range header[1:] {
		name = strings.TrimSpace(name)
		line, column := in.FieldPos(i + 1)
		switch {
		case !slices.Contains(tierKeys.names(), name):
			r.add(line, column, fmt.Errorf("%s", unknownKey(name, tierKeys.names(), synonymsInLimit)))
		case slices.ContainsFunc(v.columns, func(k *key) bool { return k.name == name }):
			r.add(line, column, fmt.Errorf("duplicate column %s", name))
		default:
			v.columns = append(v.columns, tierKeys.find(name))
		}
	}
	if len(header) == 1 {
		r.add(1, 1, fmt.Errorf("no column but source: add some of %s", strings.Join(tierKeys.names(), ", ")))
	}
	if len(r.errors) > 0 {
		return nil, r.errors
	}
	known := make([]map[string]any, len(v.columns)) // by text: most lines have the values of others
	for i := range known {
		known[i] = map[string]any{}
	}
	first := map[netip.Prefix]int{}
	for !r.full() {
		fields, err := in.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			r.addCSV(err)
			break
		}
		v.row(&r, in, fields, known, first)
	}
	return v, r.result()
}

// addCSV adds an error of encoding/csv.
func (r *sourceFile) addCSV(err error) {
	var parse *csv.ParseError
	switch {
	case errors.Is(err, io.EOF):
		r.add(1, 1, errors.New("the file is empty: it needs a header such as source,rate,max_connections"))
	case errors.As(err, &parse):
		r.add(parse.Line, parse.Column, parse.Err)
	default:
		r.add(1, 1, err)
	}
}

// row adds a line of the file.
func (v *SourceValues) row(r *sourceFile, in *csv.Reader, fields []string, known []map[string]any, first map[netip.Prefix]int) {
	line, column := in.FieldPos(0)
	source, err := parsePrefix(strings.TrimSpace(fields[0]))
	switch {
	case err != nil:
		r.add(line, column, fmt.Errorf("source: %w", err))
		return
	case len(fields) != len(v.columns)+1:
		r.add(line, column, fmt.Errorf("%d columns, and the header has %d", len(fields), len(v.columns)+1))
		return
	case first[source] > 0:
		r.add(line, column, fmt.Errorf("source: %v is also in line %d", source, first[source]))
		return
	case len(v.rows) == maxSourceLines:
		r.add(line, column, fmt.Errorf("too many lines: at most %d", maxSourceLines))
		return
	}
	first[source] = line
	v.rows = append(v.rows, valuesRow{source, line})
	for i, k := range v.columns {
		text := strings.TrimSpace(fields[i+1])
		value, ok := known[i][text]
		if text != "" && !ok {
			raw, err := parseScalar(k.name, text)
			if err == nil {
				if value, err = k.typ.parse(k.name, raw, nil); err != nil {
					err = fmt.Errorf("%s: %w", k.name, err)
				}
			}
			if err != nil {
				line, column := in.FieldPos(i + 1)
				r.add(line, column, err)
			}
			known[i][strings.Clone(text)] = value
		}
		v.cells = append(v.cells, value)
	}
}

// For returns the values of sources under l. The error is an [Errors].
func (v *SourceValues) For(l *shaper.Limit) ([]shaper.SourceValues, error) {
	r := sourceFile{path: v.path}
	all := make([]shaper.SourceValues, 0, len(v.rows))
	tier := *l
	for n, row := range v.rows {
		values := l.Values()
		tier = l.With(&values)
		for i, k := range v.columns {
			if cell := v.cells[n*len(v.columns)+i]; cell != nil {
				k.field.set(&tier, cell)
			}
		}
		values = tier.Values()
		if bits, name := l.PrefixOf(row.source.Addr()); row.source.Bits() > bits {
			r.add(row.line, 1, fmt.Errorf("source: %v is longer than %s = %d of limit %s: a bucket has one value", row.source, name, bits, quote(l.Name)))
		} else if err := l.CheckValues(&values); err != nil {
			r.add(row.line, 1, fmt.Errorf("limit %s: %w", quote(l.Name), err))
		}
		if r.full() {
			break
		}
		all = append(all, shaper.SourceValues{Source: row.source, Values: values})
	}
	return all, r.result()
}
