// Package quotafile keeps what is claimed of quotas in a file, safe from a crash.
//
// The file has a line for each record that was written, with its checksum: the last line of a name counts. Lines are appended, and
// from time to time the file is written anew without those that count no more. A line that a crash left unfinished is at the end, and
// was never in use; so it is cut off. Anything else that is wrong is an error: a quota must not begin again.
//
// An embedded database was tried first. bbolt ends the process when its file was cut short, and needs two syncs for each write; this
// needs one.
package quotafile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/safefile"
	"shaperd.dev/shaperd/shaper/quota"
)

// File is a file of quotas. Its methods must not be called concurrently.
type File struct {
	folder *os.File
	name   string
	lock   *os.File
	file   *os.File                 // nil if it has to be written anew
	size   int64                    // of the whole lines
	lines  int                      // that count or not
	live   map[string]*quota.Record // those that count
}

// line is one line of the file, after its checksum.
type line struct {
	Name   string
	Record *quota.Record // nil if it was removed
}

// maxSize is the maximum size of the file: 50,000 keys of rolling quotas take 20 MB.
const maxSize = 1 << 30

// rewriteLines is how many lines that count no more the file has at most for each that does, and some.
const (
	rewriteRatio = 4
	rewriteSlack = 10_000
)

var table = crc32.MakeTable(crc32.Castagnoli)

// Open opens the file at a path, or makes it, and returns the records in it, by the name of their budget, without those that are over
// at now. Only one process may have it open.
func Open(path string, now time.Time) (_ *File, _ map[string]*quota.Record, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("quotas in %s: %w", path, err)
		}
	}()
	f := &File{name: filepath.Base(path), live: map[string]*quota.Record{}}
	if f.folder, err = os.Open(filepath.Dir(path)); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if f.lock, err = os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, nil, err
	}
	if err := unix.Flock(int(f.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, nil, fmt.Errorf("another process has it open: %w", err)
	}
	if err := os.Remove(path + ".next"); err != nil && !errors.Is(err, os.ErrNotExist) { // a crash left it
		return nil, nil, err
	}
	if f.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return nil, nil, err
	}
	if err := f.read(); err != nil {
		return nil, nil, err
	}
	for name, r := range f.live {
		if r.Over(now) {
			delete(f.live, name)
		}
	}
	if err := f.rewrite(); err != nil {
		return nil, nil, err
	}
	records := make(map[string]*quota.Record, len(f.live))
	for name, r := range f.live {
		records[name] = r
	}
	return f, records, nil
}

// read reads the lines of the file.
func (f *File) read() error {
	text, err := io.ReadAll(io.LimitReader(f.file, maxSize+1))
	if err != nil {
		return err
	}
	if len(text) > maxSize {
		return fmt.Errorf("has more than %d bytes", maxSize)
	}
	for len(text) > 0 {
		one, rest, whole := bytes.Cut(text, []byte{'\n'})
		l, err := parse(one)
		if err != nil || !whole {
			if isUnfinished(rest) {
				return nil
			}
			return fmt.Errorf("line %d is damaged: %w; what was used is not known: restore the file, or remove it to begin all quotas again", f.lines+1, err)
		}
		f.lines++
		f.put(l.Name, l.Record)
		text = rest
	}
	return nil
}

// isUnfinished reports whether a damaged line is what a crash left of the last write: no whole line follows it.
func isUnfinished(rest []byte) bool {
	for one := range bytes.SplitSeq(rest, []byte{'\n'}) {
		if _, err := parse(one); err == nil {
			return false
		}
	}
	return true
}

func parse(text []byte) (l line, err error) {
	sum, body, ok := bytes.Cut(text, []byte{' '})
	want, err := strconv.ParseUint(string(sum), 16, 32)
	switch {
	case !ok || err != nil:
		return l, errors.New("it has no checksum")
	case uint32(want) != crc32.Checksum(body, table):
		return l, errors.New("its checksum is another")
	}
	err = json.Unmarshal(body, &l)
	return l, err
}

func appendLine(to *bytes.Buffer, name string, r *quota.Record) error {
	body, err := json.Marshal(line{name, r})
	if err == nil {
		fmt.Fprintf(to, "%08x %s\n", crc32.Checksum(body, table), body)
	}
	return err
}

func (f *File) put(name string, r *quota.Record) {
	if r == nil {
		delete(f.live, name)
	} else {
		f.live[name] = r
	}
}

// Write implements conn.QuotaStore.
func (f *File) Write(records map[string]*quota.Record) error {
	var text bytes.Buffer
	for name, r := range records {
		if err := appendLine(&text, name, r); err != nil {
			return err
		}
	}
	if f.file == nil || f.lines+len(records) > rewriteRatio*len(f.live)+rewriteSlack {
		if err := f.rewrite(); err != nil {
			return err
		}
	}
	_, err := f.file.WriteAt(text.Bytes(), f.size)
	if err == nil {
		err = unix.Fdatasync(int(f.file.Fd()))
	}
	if err != nil {
		// What is in the file is not known now. All of it is written anew the next time.
		err = fmt.Errorf("write quotas: %w", err)
		_ = f.file.Truncate(f.size)
		_ = f.file.Close()
		f.file = nil
		return err
	}
	f.size += int64(text.Len())
	f.lines += len(records)
	for name, r := range records {
		f.put(name, r)
	}
	return nil
}

// rewrite writes the file anew, with the lines that count.
func (f *File) rewrite() error {
	var text bytes.Buffer
	for name, r := range f.live {
		if err := appendLine(&text, name, r); err != nil {
			return err
		}
	}
	if err := safefile.Write(f.folder, f.name, text.Bytes(), safefile.Ownership{Mode: 0o600, UID: -1}, nil); err != nil {
		return fmt.Errorf("write quotas: %w", err)
	}
	next, err := os.OpenFile(filepath.Join(f.folder.Name(), f.name), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	if f.file != nil {
		_ = f.file.Close()
	}
	f.file, f.size, f.lines = next, int64(text.Len()), len(f.live)
	return nil
}

// Close closes the file.
func (f *File) Close() error {
	var errs []error
	for _, o := range []*os.File{f.file, f.lock, f.folder} {
		if o != nil {
			errs = append(errs, o.Close())
		}
	}
	return errors.Join(errs...)
}
